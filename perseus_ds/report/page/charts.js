// Charts of plotly, in the colours of the page; and what has to be drawn again when the page changes.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 760px)");
const config = { responsive: true, displaylogo: false, displayModeBar: false };
// On A4: the width less its margins, that of one of three charts side by side, and the most height of a chart [px].
const PAPER = 700, THIRD_OF_PAPER = 230, PAPER_HEIGHT = 340;
let printing = false;
// What all charts have in common.
const AXIS = { title: { standoff: 8 }, gridcolor: "var(--grid)", zeroline: false, automargin: true };
const LOOK = {
  font: { family: "system-ui, sans-serif", size: 13, color: "var(--ink)" },
  paper_bgcolor: "var(--surface)", plot_bgcolor: "var(--surface)", xaxis: AXIS, yaxis: AXIS,
  legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0, xanchor: "left" },
  hoverlabel: { bgcolor: "var(--surface)", bordercolor: "var(--line)", font: { color: "var(--ink)" } },
};

const colour = (name) => data.palette[name][dark.matches && !printing ? 1 : 0];

// The same figure with colours instead of names of colours.
function painted(value) {
  if (typeof value === "string") {
    return value.startsWith("var(--") ? colour(value.slice(6, -1)) : value;
  }
  if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(painted);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, painted(part)]));
}

function drawCharts() {
  for (const [id, figure] of Object.entries(data.figures)) {
    const plot = byId(id), layout = { ...painted(figure.layout), hovermode: "closest", dragmode: false, autosize: true };
    layout.template = { layout: painted(LOOK) };
    layout.margin = { l: 64, r: 16, t: 24, b: 48, ...(narrow.matches && !printing ? { l: 52, r: 6 } : {}) };
    if (printing) {
      layout.autosize = false;
      layout.width = plot.closest(".three") ? THIRD_OF_PAPER : PAPER;
    }
    const shown = painted(figure.data);
    if (narrow.matches && !printing) {
      for (const trace of shown) trace.name = trace.name?.replace(", run ", ",<br>run ");  // lines of the legend are not wrapped
    }
    // The rules for paper hold only later, so its height is set here.
    plot.style.height = printing ? `${Math.min(plot.clientHeight, PAPER_HEIGHT)}px` : "";
    layout.height = plot.clientHeight;
    Plotly.react(plot, shown, layout, config);
  }
}

const drawings = [drawCharts];
function drawEverything() { for (const draw of drawings) draw(); }

dark.addEventListener("change", drawEverything);
narrow.addEventListener("change", drawEverything);
window.addEventListener("beforeprint", () => { printing = true; drawEverything(); });
window.addEventListener("afterprint", () => { printing = false; drawEverything(); });

// Figures for people.

const fixed = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }).replaceAll(",", "\u202f");
const signed = (value) => {
  const text = Math.abs(100 * value).toFixed(1);
  return `${text === "0.0" ? "" : value < 0 ? "\u2212" : "+"}${text} %`;
};
function joules(value) {
  const [unit, size] = [["GJ", 1e9], ["MJ", 1e6], ["kJ", 1e3], ["J", 1]].find(([, least]) => Math.abs(value) >= 0.99995 * least) || ["J", 1];
  const scaled = value / size;
  return `${fixed(scaled, Math.max(0, 3 - Math.floor(Math.log10(Math.abs(scaled) || 1))))} ${unit}`;
}

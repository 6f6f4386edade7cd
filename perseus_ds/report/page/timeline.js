// Timelines, one above the other on the same axis, as SVG. Bars of one colour are one path: thousands of bars are drawn
// at each step of the slider.

const SHADES = 64, MOST_NAMES = 500;
const view = { range: null, colour: "clock", panels: [], geometry: null };

function geometryOf(panels, width) {
  const ranks = Math.max(...panels.map((panel) => panel.ranks));
  const row = Math.max(7, Math.min(34, Math.floor(440 / ranks)));
  const small = narrow.matches && !printing;
  const left = small ? 24 : 58, title = small ? 42 : 28, right = 12;
  // In steps of a twentieth, so that bars of other timelines stay where they are as plans become slower.
  const times = panels.map((panel) => panel.time);
  const longest = (Math.ceil((Math.max(...times) / times[0]) * 20 - 0.1) / 20) * times[0] * 1.005;
  const [from, to] = view.range || [0, longest];
  const each = title + ranks * row + 10;
  return {
    width, left, right, row, title, each, from, to, longest, small, bottom: panels.length * each,
    height: panels.length * each + 40,
    x: (time) => left + ((time - from) / (to - from)) * (width - left - right),
    time: (x) => from + ((x - left) / (width - left - right)) * (to - from),
    y: (panel, rank) => panel * each + title + rank * row,
  };
}

const valueOf = (bar) => (view.colour === "power" ? powerOf(bar) : bar.clock);

// The same for all plans, so that their colours compare.
const limits = {};
function limitsOf() {
  const clocks = pipeline ? [pipeline.baseline, ...pipeline.plans].flatMap(clocksOf)
    : data.measured.flatMap((iteration) => iteration.bars.map((bar) => bar.at(-1)).filter((clock) => clock !== null));
  const range = extent(clocks);
  if (view.colour === "clock") return range;
  const rows = Object.values(pipeline.rows).flatMap((byClock) => Object.entries(byClock));
  return extent(rows.filter(([clock]) => range[0] <= clock && clock <= range[1]).map(([, [time, energy]]) => energy / time));
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  return low < high ? [low, high] : [low - 1, low + 1];
}

// A colour of the scale, from 0 to 1.
function shade(share) {
  const place = share * (data.scale.length - 1), index = Math.min(Math.floor(place), data.scale.length - 2);
  const channels = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const [low, high] = [channels(data.scale[index]), channels(data.scale[index + 1])];
  return `rgb(${low.map((channel, i) => Math.round(channel + (place - index) * (high[i] - channel)))})`;
}

function drawTimelines(panels) {
  const box = byId("timeline");
  view.panels = panels;
  box.panels = panels;
  if (!panels.length) return;
  limits[view.colour] ??= limitsOf();
  const geometry = view.geometry = geometryOf(panels, printing ? PAPER : box.clientWidth);
  const { width, height, from, to } = geometry, look = [width, height, from, to, view.colour].join();
  if (box.dataset.look !== look) {
    box.dataset.look = look;
    box.innerHTML = `<svg width="${width}" height="${height}" role="img"><defs>${HATCH}</defs>${panels.map(() => '<g class="panel"></g>').join("")}${axisSvg(geometry)}<rect id="selection" hidden></rect></svg>`;
  }
  box.firstChild.setAttribute("aria-label", panels.map((panel) => panel.title.join(": ")).join("; "));
  box.querySelectorAll(".panel").forEach((group, index) => {
    if (group.panel === panels[index]) return;
    group.panel = panels[index];
    group.innerHTML = panelSvg(panels[index], index, geometry);
  });
  scaleLegend();
}

const HATCH = '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="waiting" width="6" height="6"/><rect class="hatch" width="1.2" height="6"/></pattern>';
const escaped = (text) => text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

function panelSvg(panel, index, g) {
  const [low, high] = limits[view.colour], byFill = new Map(), names = [];
  const visible = panel.bars.filter((bar) => bar.end > g.from && bar.start < g.to);
  const named = !g.small && visible.length <= MOST_NAMES && g.row >= 12;
  for (const bar of visible) {
    const value = valueOf(bar), share = value === null ? null : Math.min(1, Math.max(0, (value - low) / (high - low)));
    const x = g.x(Math.max(bar.start, g.from)), width = g.x(Math.min(bar.end, g.to)) - x;
    const height = g.row * (isLow(bar) ? 0.5 : 0.82), top = g.y(index, bar.rank) + (g.row - height) / 2;
    const key = `${share === null ? "fixed" : Math.round(share * (SHADES - 1))} ${bar.critical && bar.target < 0 ? 1 : 0}`;
    if (!byFill.has(key)) byFill.set(key, []);
    byFill.get(key).push(`M${x.toFixed(2)} ${top.toFixed(2)}h${width.toFixed(2)}v${height.toFixed(2)}h${(-width).toFixed(2)}z`);
    const letters = share === null || bar.kind === TAIL ? "" : `${data.kinds[bar.kind][0].toUpperCase()}${bar.microBatch}`;
    if (named && letters && width >= 7 * letters.length + 2) {
      names.push(`<text x="${(x + width / 2).toFixed(1)}" y="${g.y(index, bar.rank) + g.row / 2}" class="${share < 0.42 ? "on-dark" : "on-light"}">${letters}</text>`);
    }
  }
  // Transfers and loads first, then instructions, the critical ones last, so that they lie on top.
  const order = ([key]) => (key.startsWith("fixed") ? 0 : 1 + Number(key.endsWith("1")));
  const paths = [...byFill].sort((a, b) => order(a) - order(b)).map(([key, shapes]) => {
    const [fill, critical] = key.split(" ");
    const style = fill === "fixed" ? "" : ` fill="${shade(Number(fill) / (SHADES - 1))}"`;
    return `<path class="bar ${fill === "fixed" ? "fixed" : ""} ${critical === "1" ? "critical" : ""}"${style} d="${shapes.join("")}"/>`;
  });
  const top = g.y(index, 0), rows = panel.ranks * g.row, end = g.x(Math.min(panel.time, g.to));
  const every = Math.ceil(14 / g.row);
  const labels = [...Array(panel.ranks).keys()].filter((rank) => rank % every === 0).map((rank) => (
    `<text class="rank" x="${g.left - 6}" y="${g.y(index, rank) + g.row / 2}">${g.small ? rank : `rank ${rank}`}</text>`
  ));
  const waiting = [...Array(panel.ranks).keys()].map((rank) => (
    `<rect fill="url(#hatch)" x="${g.left}" y="${g.y(index, rank) + 0.09 * g.row}" width="${Math.max(0, end - g.left)}" height="${0.82 * g.row}"/>`
  ));
  return `<text class="title" x="${g.small ? 0 : g.left}" y="${top - (g.small ? 24 : 8)}">${titleSvg(panel.title, g)}</text>${labels.join("")}`
    + `${waiting.join("")}${paths.join("")}<path class="step" d="${stepsOf(visible, index, g)}"/>${names.join("")}<path class="grid" d="M${end} ${top}v${rows}"/>`;
}

// The name in bold, and the figures after it, or on a phone below it.
function titleSvg([name, figures], g) {
  return g.small ? `<tspan class="name">${escaped(name)}</tspan><tspan x="0" dy="16">${escaped(figures)}</tspan>`
    : `<tspan class="name">${escaped(name)}:</tspan> ${escaped(figures)}`;
}

// A line wherever the critical path goes over to another rank.
function stepsOf(bars, index, g) {
  const path = bars.filter((bar) => bar.critical && bar.target < 0).sort((a, b) => a.start - b.start);
  const lines = [];
  for (let i = 1; i < path.length; i++) {
    const [from, to] = [path[i - 1], path[i]];
    if (from.rank === to.rank) continue;
    const down = to.rank > from.rank ? 1 : -1;
    const edge = (bar, side) => g.y(index, bar.rank) + g.row * (0.5 + side * (isLow(bar) ? 0.25 : 0.41));
    lines.push(`M${g.x(from.end).toFixed(2)} ${edge(from, down).toFixed(2)}L${g.x(to.start).toFixed(2)} ${edge(to, -down).toFixed(2)}`);
  }
  return lines.join("");
}

function axisSvg(g) {
  const rough = (g.to - g.from) / (g.small ? 4 : 8), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const marks = [];
  for (let tick = Math.ceil(g.from / step - 1e-9); tick * step <= g.to; tick++) {
    const x = g.x(tick * step).toFixed(1);
    marks.push(`<path class="tick" d="M${x} ${g.bottom}v4"/><text class="tick" x="${x}" y="${g.bottom + 12}">${(tick * step).toFixed(digits)}</text>`);
  }
  return `<g class="axis">${marks.join("")}<text class="tick" x="${(g.left + g.width - g.right) / 2}" y="${g.bottom + 30}">time [s]</text></g>`;
}

function scaleLegend() {
  const scale = byId("scale"), [low, high] = limits[view.colour];
  scale.hidden = !view.panels.some((panel) => panel.bars.some((bar) => valueOf(bar) !== null));
  const [name, unit] = view.colour === "power" ? ["Power while it runs", "W"] : ["SM clock", "MHz"];
  scale.querySelector("b").textContent = name;
  scale.querySelector(".least").textContent = `${fixed(low, 0)} ${unit}`;
  scale.querySelector(".most").textContent = `${fixed(high, 0)} ${unit}`;
}

// What is below the pointer.

function barAt(x, y) {
  const g = view.geometry, panel = Math.floor(y / g.each);
  const rank = Math.floor((y - g.y(panel, 0)) / g.row), time = g.time(x);
  const shown = view.panels[panel];
  if (!shown || rank < 0 || rank >= shown.ranks || time < g.from || time > shown.time) return null;
  const here = shown.bars.filter((bar) => bar.rank === rank && bar.start <= time && time < bar.end);
  return { panel: shown, rank, bar: here.find((bar) => bar.clock !== null) || here[0] };
}

function tipOf({ panel, rank, bar }) {
  if (!bar) {
    const waits = panel.time - busyOf(panel)[rank];
    return [`rank ${rank} waits`, `${fixed(waits, 3)} s in all, ${fixed((100 * waits) / panel.time, 1)} % of the iteration`];
  }
  const power = powerOf(bar), lines = [nameOf(bar), `${fixed(1000 * (bar.end - bar.start), 1)} ms, from ${bar.start.toFixed(4)} s`];
  if (bar.clock !== null) lines.push(`${bar.clock} MHz` + (power === null ? "" : `, ${power.toFixed(0)} W, ${joules(power * (bar.end - bar.start))}`));
  if (bar.critical) lines.push("on the critical path");
  return lines;
}

// Zooming: by dragging, by buttons, and back by a double click.

function zoom(factor, middle) {
  const g = view.geometry, half = ((g.to - g.from) * factor) / 2, centre = middle ?? (g.from + g.to) / 2;
  setRange(Math.max(0, centre - half), Math.min(g.longest, centre + half));
}

function setRange(from, to) {
  const { longest } = view.geometry;
  view.range = to - from >= longest * 0.999 || to - from < longest * 1e-4 ? null : [from, to];
  drawTimelines(view.panels);
}

function listenToTimeline() {
  const box = byId("timeline"), tip = byId("tip");
  let pressed = null;
  const place = (event) => { const at = box.getBoundingClientRect(); return [event.clientX - at.left, event.clientY - at.top]; };
  box.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) pressed = place(event)[0]; });
  box.addEventListener("pointermove", (event) => {
    const [x, y] = place(event), found = view.geometry && barAt(x, y), selection = byId("selection");
    tip.hidden = !found;
    if (found) {
      tip.replaceChildren(...tipOf(found).map((line) => { const made = document.createElement("span"); made.textContent = line; return made; }));
      tip.style.left = `${Math.max(0, Math.min(x + 14, box.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${y + 18}px`;
    }
    if (pressed !== null) {
      const [first, last] = [Math.min(pressed, x), Math.max(pressed, x)];
      selection.removeAttribute("hidden");
      for (const [name, value] of Object.entries({ x: first, y: 0, width: last - first, height: view.geometry.bottom })) selection.setAttribute(name, value);
    }
  });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  window.addEventListener("pointerup", (event) => {
    if (pressed === null) return;
    const [first, last] = [pressed, place(event)[0]].sort((a, b) => a - b);
    pressed = null;
    if (last - first > 5) setRange(Math.max(0, view.geometry.time(first)), Math.min(view.geometry.longest, view.geometry.time(last)));
  });
  box.addEventListener("dblclick", () => { view.range = null; drawTimelines(view.panels); });
  const actions = { in: () => zoom(0.5), out: () => zoom(2), all: () => { view.range = null; drawTimelines(view.panels); } };
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", actions[button.dataset.zoom]);
  let width = box.clientWidth;
  new ResizeObserver(() => {
    if (box.clientWidth === width || printing) return;
    width = box.clientWidth;
    drawTimelines(view.panels);
  }).observe(box);
}

// What a reader of a report can choose: the plan, what colours mean, a measured iteration.

const state = { plan: data.in_use, measured: -1, asked: false };

// Each of them once, so that only the one that changes is drawn again.
const made = {};

function panelsShown() {
  const shown = [];
  if (pipeline) {
    const [time, energy] = data.baseline, [planTime, planEnergy] = data.plans[state.plan];
    shown.push(made.baseline ??= { ...predict(pipeline.baseline), title: titleOf("Everything at the highest clock, predicted", time, energy) });
    if (made.plan?.number !== state.plan) {
      made.plan = { ...predict(pipeline.plans[state.plan]), number: state.plan, title: titleOf(`Plan ${state.plan}, predicted`, planTime, planEnergy) };
    }
    shown.push(made.plan);
  }
  if (state.measured >= 0) {
    if (made.measured?.number !== state.measured) {
      const panel = measured(state.measured);
      made.measured = { ...panel, number: state.measured, title: titleOf(`Measured: ${data.measured[state.measured].label}`, panel.time, panel.energy) };
    }
    shown.push(made.measured);
  }
  return shown;
}

const titleOf = (name, time, energy) => [name, `${fixed(time, 3)} s` + (energy === null ? "" : `, ${joules(energy)}`)];

function drawPipeline() {
  if (!byId("timeline")) return;
  const shown = panelsShown();
  drawTimelines(shown);
  if (pipeline) fillSlack(shown[0], shown[1]);
}

// Each rank's share of computing and waiting, and its energy.

function fillSlack(before, after) {
  const body = document.querySelector("#slack tbody"), names = [...document.querySelectorAll("#slack thead th")].map((head) => head.textContent);
  const figures = [before, after].map((panel) => ({ time: panel.time, busy: busyOf(panel), energy: energyOf(panel) }));
  body.replaceChildren(...figures[0].busy.map((_, rank) => {
    const row = document.createElement("tr"), cells = [];
    for (const { time, busy, energy } of figures) {
      const share = busy[rank] / time;
      cells.push(cell(`${fixed(100 * share, 1)} %`, share, ""), cell(`${fixed(100 * (1 - share), 1)} %`, 1 - share, "waits"), cell(joules(energy[rank])));
    }
    cells.push(cell(meanClock(after.bars, rank, true)), cell(meanClock(after.bars, rank, false)));
    cells.forEach((made, column) => { made.dataset.label = names[column + 1]; });
    const heading = document.createElement("th");
    heading.textContent = `rank ${rank}`;
    heading.scope = "row";
    row.append(heading, ...cells);
    return row;
  }));
}

function cell(text, share, name) {
  const made = document.createElement("td");
  made.textContent = text;
  if (share !== undefined) {
    made.className = `share ${name}`;
    made.style.setProperty("--share", `${100 * share}%`);
  }
  return made;
}

function choose(plan) {
  state.plan = plan;
  const [time, energy, bound, changes] = data.plans[plan], [beforeTime, beforeEnergy] = data.baseline;
  const ring = data.figures.frontier.data.findIndex((trace) => trace.meta === "selected");
  Object.assign(data.figures.frontier.data[ring], { x: [time], y: [energy] });
  if (byId("frontier").data) Plotly.restyle("frontier", { x: [[time]], y: [[energy]] }, [ring]);
  const gap = bound === null ? "" : `, ${(100 * (energy / bound - 1)).toFixed(2)} % above the bound`;
  const text = `Plan ${plan}: ${fixed(time, 4)} s (${signed(time / beforeTime - 1)}), ${joules(energy)} (${signed(energy / beforeEnergy - 1)}) against everything at the highest clock${gap}; the clock changes ${changes} times.`;
  byId("chosen").textContent = text;
  byId("plan").value = plan;
  byId("plan").setAttribute("aria-valuetext", text);
  byId("plan-number").textContent = plan;
  const ran = data.measured.findIndex((iteration) => iteration.plan === plan);
  if (ran >= 0) showMeasured(ran);
  drawSoon();
}

function showMeasured(number) {
  state.measured = number;
  byId("measured").value = number;
}

// A slider asks for more drawings than there is time for: only the last one counts.
function drawSoon() {
  if (state.asked) return;
  state.asked = true;
  requestAnimationFrame(() => { state.asked = false; drawPipeline(); });
}

function listen() {
  if (byId("timeline")) listenToTimeline();
  if (data.plans) {
    byId("plan").addEventListener("input", (event) => choose(Number(event.target.value)));
    for (const button of document.querySelectorAll("[data-plan]")) {
      button.addEventListener("click", () => choose(Number(button.dataset.plan)));
    }
    byId("frontier").on("plotly_click", ({ points }) => {
      const point = points.find((candidate) => candidate.data.meta === "plans");
      if (point) choose(point.pointNumber);
    });
  }
  for (const radio of document.querySelectorAll("[name=colour]")) {
    radio.addEventListener("change", () => { view.colour = radio.value; drawSoon(); });
  }
  const select = byId("measured");
  if (!select) return;
  select.append(new Option("hidden", -1), ...data.measured.map((iteration, number) => new Option(iteration.label, number)));
  select.addEventListener("change", () => { state.measured = Number(select.value); drawSoon(); });
  if (!pipeline) showMeasured(data.measured.length - 1);
}

drawings.push(drawPipeline);
drawCharts();
listen();
if (data.plans) choose(state.plan);
else drawSoon();

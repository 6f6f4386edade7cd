"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const phone = window.matchMedia("screen and (max-width: 760px)").matches;
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const TAIL = data.kinds.indexOf("tail"), FORWARD = data.kinds.indexOf("forward");
  const NO_CLOCK = "#8a94a1";
  const state = { plan: data.in_use, colour: "clock", measured: -1, drawing: false };

  const ranges = {};

  // The pipeline: when every node starts follows from the plan's clocks.

  const pipeline = data.pipeline;

  function clocksOf(packed) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true));
  }

  function predict(packed) {
    const clocks = clocksOf(packed), count = pipeline.kind.length;
    const finish = new Float64Array(count), duration = new Float64Array(count), clock = new Array(count).fill(null);
    for (let n = 0; n < count; n++) {
      duration[n] = pipeline.fixed_s[n];
      if (pipeline.option[n] >= 0) {
        clock[n] = clocks[pipeline.option[n]];
        duration[n] = rowOf(pipeline.stage[n], pipeline.kind[n], clock[n])[0];
      }
      for (const before of pipeline.predecessors[n]) finish[n] = Math.max(finish[n], finish[before]);
      finish[n] += duration[n];
    }
    const critical = criticalPath(finish);
    const bars = [];
    for (let n = 0; n < count; n++) {
      if (duration[n] <= 0) continue;
      for (const rank of pipeline.node_ranks[n]) {
        bars.push({
          rank, start: finish[n] - duration[n], end: finish[n], kind: pipeline.kind[n], stage: pipeline.stage[n],
          target: pipeline.target[n], microBatch: pipeline.micro_batch[n], clock: clock[n], critical: critical.has(n),
        });
      }
    }
    return { bars, ranks: pipeline.ranks, time: finish.reduce((a, b) => Math.max(a, b), 0) };
  }

  function criticalPath(finish) {
    let node = finish.indexOf(finish.reduce((a, b) => Math.max(a, b), 0));
    const path = new Set([node]);
    while (pipeline.predecessors[node].length) {
      node = pipeline.predecessors[node].reduce((a, b) => (finish[b] > finish[a] ? b : a));
      path.add(node);
    }
    return path;
  }

  function rowOf(stage, kind, clock) {
    return pipeline ? (pipeline.rows[`${stage}/${kind}`] || {})[clock] : undefined;
  }

  function powerOf(bar) {
    const row = bar.clock === null ? undefined : rowOf(bar.stage, bar.kind, bar.clock);
    return row ? row[1] / row[0] : null;
  }

  function measured(number) {
    const found = data.measured[number];
    const bars = found.bars.map(([rank, start, end, kind, stage, target, microBatch, clock]) => (
      { rank, start, end, kind, stage, target, microBatch, clock, critical: false }
    ));
    return { bars, ranks: found.ranks, time: found.time_s, energy: found.energy_j };
  }

  // Words.

  const fixed = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }).replaceAll(",", "\u202f");
  const signed = (value) => {
    const text = Math.abs(100 * value).toFixed(1);
    return `${text === "0.0" ? "\u00b1" : value < 0 ? "\u2212" : "+"}${text} %`;
  };

  function nameOf(bar) {
    const kind = data.kinds[bar.kind];
    if (bar.target >= 0) return `${kind} of micro-batch ${bar.microBatch}, stage ${bar.stage} to ${bar.target}`;
    return bar.kind === TAIL ? `tail of stage ${bar.stage}` : `${kind} of micro-batch ${bar.microBatch}, stage ${bar.stage}`;
  }

  function tipOf(bar) {
    const power = powerOf(bar), lines = [`<b>${nameOf(bar)}</b>`];
    lines.push(`${fixed(1000 * (bar.end - bar.start), 1)} ms, from ${bar.start.toFixed(4)} s`);
    if (bar.clock !== null) lines.push(`${bar.clock} MHz` + (power === null ? "" : `, ${power.toFixed(0)} W`));
    if (bar.critical) lines.push("on the critical path");
    return lines.join("<br>");
  }

  // Timelines, one above the other on the same axis.

  // The same for all plans, so that their colours compare.
  function colourRange() {
    const clocks = pipeline ? [pipeline.baseline, ...pipeline.plans].flatMap(clocksOf)
      : data.measured.flatMap((iteration) => iteration.bars.map((bar) => bar.at(-1)).filter((clock) => clock !== null));
    const range = extent(clocks);
    if (state.colour === "clock") return range;
    const rows = Object.values(pipeline.rows).flatMap((byClock) => Object.entries(byClock));
    return extent(rows.filter(([clock]) => range[0] <= clock && clock <= range[1]).map(([, [time, energy]]) => energy / time));
  }

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    return low < high ? [low, high] : [low - 1, low + 1];
  }

  function tracesOf(panel, index, showNames) {
    const yaxis = index ? `y${index + 1}` : "y";
    const coloured = [], plain = [];
    for (const bar of panel.bars) {
      ((state.colour === "power" ? powerOf(bar) : bar.clock) === null ? plain : coloured).push(bar);
    }
    return [
      waitingTrace(panel, yaxis),
      barTrace(plain, yaxis, false, { color: NO_CLOCK }),
      barTrace(coloured, yaxis, showNames, {
        color: coloured.map((bar) => (state.colour === "power" ? powerOf(bar) : bar.clock)), coloraxis: "coloraxis",
        line: { color: coloured.map((bar) => (bar.critical ? "black" : "white")), width: coloured.map((bar) => (bar.critical ? 1.6 : 0.4)) },
      }),
      pathTrace(panel.bars, yaxis),
    ];
  }

  function waitingTrace(panel, yaxis) {
    const busy = busyOf(panel), ranks = [...busy.keys()];
    return {
      type: "bar", orientation: "h", yaxis, y: ranks, x: ranks.map(() => panel.time), width: 0.82,
      marker: { color: "#f4f5f7", pattern: { shape: "/", fgcolor: "#c6ccd5", size: 6, solidity: 0.2 } },
      customdata: ranks.map((rank) => [fixed(panel.time - busy[rank], 3), fixed(100 * (1 - busy[rank] / panel.time), 1)]),
      hovertemplate: "rank %{y} waits %{customdata[0]} s, %{customdata[1]} %<extra></extra>",
    };
  }

  function busyOf(panel) {
    const busy = new Array(panel.ranks).fill(0);
    for (const bar of panel.bars) busy[bar.rank] += bar.end - bar.start;
    return busy;
  }

  function barTrace(bars, yaxis, showNames, marker) {
    return {
      type: "bar", orientation: "h", yaxis, marker, y: bars.map((bar) => bar.rank), base: bars.map((bar) => bar.start),
      x: bars.map((bar) => bar.end - bar.start), width: bars.map((bar) => (isLow(bar) ? 0.5 : 0.82)),
      customdata: bars.map(tipOf), hovertemplate: "%{customdata}<extra></extra>",
      text: showNames ? bars.map((bar) => (bar.kind === TAIL ? "" : `${data.kinds[bar.kind][0].toUpperCase()}${bar.microBatch}`)) : undefined,
      textposition: showNames ? "inside" : "none", insidetextanchor: "middle", textangle: 0,
    };
  }

  const isLow = (bar) => data.kinds[bar.kind] === "forward" || data.kinds[bar.kind] === "recompute";

  // A line wherever the critical path goes over to another rank.
  function pathTrace(bars, yaxis) {
    const path = bars.filter((bar) => bar.critical && bar.target < 0).sort((a, b) => a.start - b.start);
    const x = [], y = [];
    for (let i = 1; i < path.length; i++) {
      const [from, to] = [path[i - 1], path[i]];
      if (from.rank === to.rank) continue;
      const down = to.rank > from.rank ? 1 : -1;
      x.push(from.end, to.start, null);
      y.push(from.rank + down * (isLow(from) ? 0.25 : 0.41), to.rank - down * (isLow(to) ? 0.25 : 0.41), null);
    }
    return { type: "scatter", mode: "lines", yaxis, x, y, line: { color: "black", width: 1.6 }, hoverinfo: "skip" };
  }

  function layoutOf(panels) {
    const ranks = Math.max(...panels.map((panel) => panel.ranks));
    const height = Math.min(Math.max(ranks * 34, 110), 480), gap = phone ? 60 : 44, top = phone ? 44 : 30, bottom = 96;
    const total = panels.length * (height + gap) - gap;
    const [low, high] = ranges[state.colour] ??= colourRange();
    const power = state.colour === "power";
    const layout = {
      height: total + top + bottom, margin: { l: phone ? 34 : 58, r: 12, t: top, b: bottom }, barmode: "overlay", showlegend: false,
      font: { family: "system-ui, sans-serif", size: 13, color: "#1b2430" }, dragmode: phone ? false : "zoom", hovermode: "closest",
      uniformtext: { minsize: 8, mode: "hide" }, annotations: [],
      xaxis: {
        title: { text: "time [s]", standoff: 6 }, range: [0, Math.max(...panels.map((panel) => panel.time)) * 1.005],
        gridcolor: "#e6e9ed", zeroline: false, anchor: panels.length > 1 ? `y${panels.length}` : "y",
      },
      coloraxis: {
        colorscale: "Viridis", cmin: low, cmax: high,
        colorbar: { orientation: "h", y: 0, yref: "container", yanchor: "bottom", thickness: 12, len: phone ? 0.9 : 0.5, outlinewidth: 0,
          title: { text: power ? "power while it runs [W]" : "SM clock [MHz]", side: "right", font: { size: 12 } } },
        showscale: panels.some((panel) => panel.bars.some((bar) => bar.clock !== null)),
      },
    };
    panels.forEach((panel, index) => {
      const upper = 1 - (index * (height + gap)) / total, lower = upper - height / total;
      layout[index ? `yaxis${index + 1}` : "yaxis"] = {
        domain: [Math.max(0, lower), upper], range: [ranks - 0.5, -0.5], fixedrange: true, zeroline: false, showgrid: false,
        tickvals: [...Array(panel.ranks).keys()], ticktext: [...Array(panel.ranks).keys()].map((rank) => (phone ? `${rank}` : `rank ${rank}`)),
      };
      layout.annotations.push({
        align: "left", text: panel.title, x: 0, xref: "paper", y: upper, yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: phone ? 11 : 13 },
      });
    });
    return layout;
  }

  function titleOf(name, time, energy) {
    const figures = `${fixed(time, 3)} s` + (energy === null ? "" : `, ${fixed(energy, 0)} J`);
    return `<b>${name}</b>${phone ? "<br>" : ": "}${figures}`;
  }

  function panels() {
    const shown = [];
    if (pipeline) {
      const [time, energy] = data.baseline, [planTime, planEnergy] = data.plans[state.plan];
      shown.push({ ...predict(pipeline.baseline), title: titleOf("Everything at the highest clock, predicted", time, energy) });
      shown.push({ ...predict(pipeline.plans[state.plan]), title: titleOf(`Plan ${state.plan}, predicted`, planTime, planEnergy) });
    }
    if (state.measured >= 0) {
      const panel = measured(state.measured);
      shown.push({ ...panel, title: titleOf(`Measured: ${data.measured[state.measured].label}`, panel.time, panel.energy) });
    }
    return shown;
  }

  function drawTimelines() {
    const shown = panels();
    const names = shown.every((panel) => panel.bars.length <= 400) && !phone;
    const traces = shown.flatMap((panel, index) => tracesOf(panel, index, names));
    Plotly.react("timeline", traces, layoutOf(shown), config);
    if (pipeline) fillSlack(shown[0], shown[1]);
  }

  // Each rank's share of computing and waiting.

  function fillSlack(before, after) {
    const body = document.querySelector("#slack tbody");
    body.replaceChildren(...busyOf(before).map((_, rank) => {
      const row = document.createElement("tr");
      const heading = document.createElement("th");
      heading.textContent = rank;
      heading.scope = "row";
      row.append(heading);
      for (const panel of [before, after]) {
        const busy = busyOf(panel)[rank] / panel.time;
        row.append(cell(`${fixed(100 * busy, 1)} %`, busy, ""), cell(`${fixed(100 * (1 - busy), 1)} %`, 1 - busy, "waits"));
      }
      row.append(cell(meanClock(after.bars, rank, true)), cell(meanClock(after.bars, rank, false)));
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

  function meanClock(bars, rank, forward) {
    let time = 0, sum = 0;
    for (const bar of bars) {
      if (bar.rank !== rank || bar.clock === null || bar.kind === TAIL || (bar.kind === FORWARD) !== forward) continue;
      time += bar.end - bar.start;
      sum += bar.clock * (bar.end - bar.start);
    }
    return time ? `${fixed(sum / time, 0)} MHz` : "–";
  }

  // Choosing.

  function choose(plan) {
    state.plan = plan;
    const [time, energy] = data.plans[plan];
    Plotly.restyle("frontier", { x: [[time]], y: [[energy]] }, [traceOf("selected")]);
    describe(plan);
    const ran = data.measured.findIndex((iteration) => iteration.plan === plan);
    if (ran >= 0) showMeasured(ran);
    drawSoon();
  }

  function describe(plan) {
    const [time, energy, bound, changes] = data.plans[plan], [beforeTime, beforeEnergy] = data.baseline;
    if (pipeline) {
      byId("plan").value = plan;
      byId("plan-number").textContent = plan;
    }
    const gap = bound === null ? "" : `, ${(100 * (energy / bound - 1)).toFixed(2)} % above the bound`;
    byId("chosen").textContent = `Plan ${plan}: ${fixed(time, 4)} s (${signed(time / beforeTime - 1)}), ${fixed(energy, 1)} J (${signed(energy / beforeEnergy - 1)}) against everything at the highest clock${gap}; the clock changes ${changes} times.`;
  }

  // A slider asks for more drawings than there is time for: only the last one counts.
  function drawSoon() {
    if (state.drawing || !byId("timeline")) return;
    state.drawing = true;
    requestAnimationFrame(() => { state.drawing = false; drawTimelines(); });
  }

  const traceOf = (meta) => byId("frontier").data.findIndex((trace) => trace.meta === meta);

  function showMeasured(number) {
    state.measured = number;
    byId("measured").value = number;
  }

  function listen() {
    const slider = byId("plan");
    if (slider) slider.addEventListener("input", () => choose(Number(slider.value)));
    for (const button of document.querySelectorAll("[data-plan]")) {
      button.addEventListener("click", () => choose(Number(button.dataset.plan)));
    }
    for (const radio of document.querySelectorAll("[name=colour]")) {
      radio.addEventListener("change", () => { state.colour = radio.value; drawSoon(); });
    }
    const select = byId("measured");
    if (!select) return;
    select.append(new Option("hidden", -1), ...data.measured.map((iteration, number) => new Option(iteration.label, number)));
    select.addEventListener("change", () => { state.measured = Number(select.value); drawSoon(); });
    if (!pipeline) showMeasured(data.measured.length - 1);
  }

  // Figures have a width of their own, so paper has to be told.
  function fitToPaper(paper) {
    for (const plot of document.querySelectorAll(".plot")) {
      if (!plot.data) continue;
      const third = plot.parentElement.classList.contains("three");
      Plotly.relayout(plot, paper ? { autosize: false, width: third ? 230 : 700 } : { autosize: true, width: null });
    }
  }

  listen();
  for (const [id, figure] of Object.entries(data.figures)) {
    if (phone) figure.layout.margin = { ...figure.layout.margin, l: 52, r: 6 };
    Plotly.newPlot(id, figure.data, figure.layout, config);
  }
  if (data.plans) {
    byId("frontier").on("plotly_click", ({ points }) => {
      const point = points.find((candidate) => candidate.data.meta === "plans");
      if (point) choose(point.pointNumber);
    });
    choose(state.plan);
  } else {
    drawSoon();
  }
  window.addEventListener("beforeprint", () => fitToPaper(true));
  window.addEventListener("afterprint", () => fitToPaper(false));
})();

// One iteration of the pipeline: when each node starts follows from the plan's clocks.

const pipeline = data.pipeline;
const TAIL = data.kinds.indexOf("tail"), FORWARD = data.kinds.indexOf("forward");

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

// Time [s] and energy [J] by the profile; undefined for what has no row.
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

// By rank: seconds in which it does something, and energy by the profile, waiting included [J].

function busyOf(panel) {
  const busy = new Array(panel.ranks).fill(0);
  for (const bar of panel.bars) busy[bar.rank] += bar.end - bar.start;
  return busy;
}

function energyOf(panel) {
  const energy = new Array(panel.ranks).fill(panel.time * pipeline.blocking_power_w);
  for (const bar of panel.bars) {
    const row = bar.clock === null ? undefined : rowOf(bar.stage, bar.kind, bar.clock);
    if (row) energy[bar.rank] += row[1] - row[0] * pipeline.blocking_power_w;
  }
  return energy;
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

const isLow = (bar) => data.kinds[bar.kind] === "forward" || data.kinds[bar.kind] === "recompute";

function nameOf(bar) {
  const kind = data.kinds[bar.kind];
  if (bar.target >= 0) return `${kind} of micro-batch ${bar.microBatch}, stage ${bar.stage} to ${bar.target}`;
  return bar.kind === TAIL ? `tail of stage ${bar.stage}` : `${kind} of micro-batch ${bar.microBatch}, stage ${bar.stage}`;
}

/* The stamps of one step: who did what when, and what other speeds would have made of it.

The rules are those of `topspin trace` (app/cli/trace/report.py and replay.py), to which a test
compares these. Pure: knows no element and no server. */

export const KINDS = [
  null, "plan", "inputs", "attention", "sent", "local", "arrived", "combined", "rallied", "sampled",
  "gathered", "joined", "experts", "replied", "plan sent", "result", "verdicts", "drafted", "offered",
  "fetched", "coded", "searched", "read", "attended", "local experts",
];
const [PLAN, INPUTS, DISPATCHED, LOCAL, ARRIVED, RALLIED, SAMPLED, GATHERED, REPLIED, VERDICTS, FETCHED, CODED] =
  [1, 2, 4, 5, 6, 8, 9, 10, 13, 16, 19, 20];
const WAITS = new Set([PLAN, ARRIVED, GATHERED, VERDICTS]);
const OUTSIDE = new Set([PLAN, FETCHED, INPUTS, CODED, SAMPLED]);
const RECORD_BYTES = 24;

export const isWait = (kind) => WAITS.has(kind);

function spansOf({ role, offset_ns: offset, records }) {
  const data = new DataView(Uint8Array.from(atob(records), (each) => each.charCodeAt(0)).buffer);
  const spans = [];
  let before = null;
  for (let at = 0; at + RECORD_BYTES <= data.byteLength; at += RECORD_BYTES) {
    const end = data.getBigUint64(at, true) - BigInt(offset);
    const kind = data.getUint16(at + 16, true);
    // An expert node's step begins with its ticket: before that it had nothing to do.
    const isPoint = role === "scheduler" || role === "expert" && kind === INPUTS;
    if (isPoint || before !== null) {
      spans.push({
        start: isPoint ? end : before, end, step: Number(data.getBigUint64(at + 8, true)), kind,
        layer: data.getUint16(at + 18, true), microBatch: data.getUint16(at + 20, true), peer: data.getUint16(at + 22, true),
      });
    }
    before = end;
  }
  return spans;
}

/* Return the nodes' timelines in one step, in seconds since its first event; null: it has none. */
export function stepOf({ nodes }) {
  const lanes = nodes.filter(({ role }) => role !== "scheduler").map((node) => ({
    role: node.role, index: node.index, name: `${node.role} ${node.index}`, spans: spansOf(node),
  }));
  const attention = lanes.filter(({ role }) => role === "attention");
  const last = attention.flatMap(({ spans }) => spans).filter(({ kind }) => kind === RALLIED).at(-1);
  if (!last) return null;
  for (const lane of lanes) lane.spans = lane.spans.filter(({ step }) => step === last.step);
  const used = lanes.filter(({ spans }) => spans.length);
  const busy = used.flatMap(({ spans }) => spans.filter(({ kind, start, end }) => !isWait(kind) && start < end));
  if (!busy.length) return null;
  const first = busy.reduce((least, { start }) => (start < least ? start : least), busy[0].start);
  const seconds = (ns) => Number(ns - first) / 1e9;
  for (const lane of used) {
    // Waits for it may have begun before the step.
    lane.spans = lane.spans.map((span) => ({ ...span, start: seconds(span.start), end: seconds(span.end) }));
    lane.tasks = tasksOf(lane);
    lane.bubble = bubbleOf(lane);
  }
  return { step: last.step, lanes: used, took: Math.max(...used.flatMap(({ spans }) => spans.map(({ end }) => end))), ...timesOf(used) };
}

/* A task is a node's work for one layer of one micro-batch; it ends with what is sent. */
function tasksOf({ role, spans }) {
  const ending = role === "attention" ? DISPATCHED : REPLIED;
  const tasks = [];
  let busy = 0;
  for (const { kind, start, end, layer, microBatch } of spans) {
    if (kind === INPUTS || kind === RALLIED) {
      busy = 0;
      continue;
    }
    if (kind === CODED) continue;
    if (kind === LOCAL && tasks.length && !busy) {
      tasks.at(-1).duration += end - start;
      continue;
    }
    if (!isWait(kind)) busy += end - start;
    if (kind === ending) {
      tasks.push({ layer, microBatch, duration: busy, end });
      busy = 0;
    }
  }
  return tasks;
}

function bubbleOf({ spans }) {
  let busy = 0;
  let wait = 0;
  for (const { kind, start, end } of spans) {
    if (OUTSIDE.has(kind)) continue;
    if (isWait(kind)) wait += end - start;
    else busy += end - start;
  }
  return busy + wait ? wait / (busy + wait) : 0;
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length ? (sorted[half] + sorted[sorted.length - 1 - half]) / 2 : null;
}

function timesOf(lanes) {
  const of = (role) => lanes.filter((lane) => lane.role === role);
  const durations = (role) => of(role).flatMap(({ tasks }) => tasks.map(({ duration }) => duration));
  const tasks = of("attention").flatMap((lane) => lane.tasks);
  const layers = [...new Set(tasks.map(({ layer }) => layer))].sort((a, b) => a - b);
  const numMicroBatches = 1 + Math.max(0, ...tasks.map(({ microBatch }) => microBatch));
  const rallies = of("attention").map(({ spans }) => {
    const began = spans.find(({ kind }) => kind === INPUTS);
    const ended = spans.find(({ kind }) => kind === RALLIED);
    return began && ended ? ended.end - began.end : 0;
  });
  const attention = median(durations("attention"));
  const experts = median(durations("expert"));
  const link = median(waysOf(lanes));
  const rally = Math.max(0, ...rallies);
  return { layers, numMicroBatches, attention, experts, link, rally, frames: framesOf(lanes), graph: graphOf(lanes, layers, numMicroBatches) };
}

/* Return each frame that both ends have recorded. */
function framesOf(lanes) {
  const sent = new Map();
  const key = (role, index, { layer, microBatch }) => `${role} ${index} ${layer} ${microBatch}`;
  for (const { role, index, spans } of lanes) {
    for (const span of spans) {
      if (span.kind === DISPATCHED || span.kind === REPLIED) sent.set(key(role, index, span), { role, index, span });
    }
  }
  return lanes.flatMap(({ role, index, spans }) => spans
    .filter(({ kind }) => kind === ARRIVED || kind === GATHERED)
    .map((read) => ({ from: sent.get(key(role === "attention" ? "expert" : "attention", read.peer, read)), to: { role, index }, read }))
    .filter(({ from }) => from));
}

/* The times of frames that their reader waited for. */
function waysOf(lanes) {
  return framesOf(lanes)
    .filter(({ from, read }) => read.start <= from.span.end && from.span.end < read.end)
    .map(({ from, read }) => read.end - from.span.end);
}

/* Return each node's durations, [layer][micro-batch], or null if some are missing. */
function graphOf(lanes, layers, numMicroBatches) {
  const graph = { attention: [], expert: [] };
  for (const { role, tasks } of lanes) {
    if (!(role in graph)) continue;
    const grid = layers.map(() => Array(numMicroBatches).fill(0));
    const seen = new Set();
    for (const { layer, microBatch, duration } of tasks) {
      if (!layers.includes(layer) || microBatch >= numMicroBatches) return null;
      grid[layers.indexOf(layer)][microBatch] += duration;
      seen.add(`${layer} ${microBatch}`);
    }
    if (seen.size !== layers.length * numMicroBatches) return null;
    graph[role].push(grid);
  }
  return layers.length && graph.attention.length && graph.expert.length ? graph : null;
}

/* Return the time of a step's last answer if frames take `link` each way.

Every node serves (layer, micro-batch) in turn: an expert node when all frames are there, an
attention node when all answers to the layer before are. */
export function replay({ attention, expert }, link) {
  const free = new Map([...attention, ...expert].map((grid) => [grid, 0]));
  const back = Array(attention[0][0].length).fill(0);
  for (let layer = 0; layer < attention[0].length; layer++) {
    for (let microBatch = 0; microBatch < back.length; microBatch++) {
      const serve = (grid, since) => {
        free.set(grid, Math.max(free.get(grid), since) + grid[layer][microBatch]);
        return free.get(grid);
      };
      const arrived = Math.max(...attention.map((grid) => serve(grid, back[microBatch]))) + link;
      back[microBatch] = Math.max(...expert.map((grid) => serve(grid, arrived))) + link;
    }
  }
  return Math.max(...back);
}

/* Return a graph with other speeds and another number of micro-batches.

Micro-batches of another number share the rows evenly; `fixed` of each task's time (0 to 1) is for
reading weights and is there in each. */
export function changed({ attention, expert }, { attentionTimes, expertTimes, numMicroBatches, fixed }) {
  const scaled = (grid, times) => grid.map((row) => {
    if (row.length === numMicroBatches) return row.map((each) => each * times);
    const mean = row.reduce((sum, each) => sum + each, 0) / row.length;
    const each = mean * (fixed + (1 - fixed) * row.length / numMicroBatches);
    return Array(numMicroBatches).fill(each * times);
  });
  return {
    attention: attention.map((grid) => scaled(grid, attentionTimes)),
    expert: expert.map((grid) => scaled(grid, expertTimes)),
  };
}

/* Return T_total = (T_a + T_e + 2 T_c) + T_f (m L - 1). */
export function formula({ attention, experts, link, layers, numMicroBatches }) {
  if (attention === null || experts === null) return null;
  const hops = numMicroBatches * layers.length;
  return attention + experts + 2 * (link ?? 0) + Math.max(attention, experts) * (hops - 1);
}

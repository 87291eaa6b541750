/* The engine: its nodes on the plan's two sides, its gauges, the last minutes, experts, news. */

import { announce, bytes, coalesced, draw, duration, make, number } from "./dom.js";
import { fillFacts, panel } from "./rally.js";

const STATES = { serving: "serves", loading: "loads", lost: "lost" };
// What is left of the net, and right of it.
const SIDES = [[["attention", "Attention"], ["stage", "Stages of attention"], ["draft", "Drafts"]], [["expert", "Experts"]]];
const LINKS = { local: "one process", shm: "shared memory", tcp: "TCP", nixl: "NIXL", cuda_ipc: "CUDA IPC" };
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class EngineView {
  constructor(section) {
    this.plan = make("div.plan");
    this.wires = draw("svg", { class: "wires", "aria-hidden": "true" });
    this.link = make("p.link");
    new ResizeObserver(coalesced(() => this.drawWires()).later).observe(this.plan);
    this.cards = new Map();
    this.connections = new Map();
    this.gauges = new Gauges();
    this.speculation = new Gauges();
    this.drafts = make("dl.facts");
    this.kv = make("dl.facts");
    this.charts = CHARTS.map((chart) => new Chart(chart));
    this.canvas = make("canvas", { role: "img", "aria-label": "How often each expert is chosen, by layer", mousemove: (event) => this.point(event) });
    this.pointed = make("p.minor", {}, "");
    this.cell = null;
    this.heat = panel("Experts by layer", "The brighter, the more often an expert of that layer was chosen lately. Point at one, or use the arrow keys.",
      make("div.scroll", { tabIndex: 0, role: "group", "aria-label": "Experts", keydown: (event) => this.step(event) }, this.canvas),
      this.pointed);
    this.speculating = panel("Speculation", "Of all drafts, those of which so many tokens were kept.", this.speculation.element, this.drafts);
    this.retrieving = panel("Long contexts", "Attention to a selection of the keys, and blocks that are in a file.", this.kv);
    this.counts = make("dl.facts");
    this.list = make("ul.news", { tabIndex: 0, "aria-label": "News" });
    this.body = make("div.panels", { hidden: true },
      panel("The plan, and its nodes now", "Rows go over the net from every attention node to every expert node, and come back. A line is red while a node at its end is lost.", this.plan),
      panel("Now", "", this.gauges.element, this.counts),
      panel("The last minutes", "Since you began to look.", make("div.charts", {}, this.charts.map(({ element }) => element))),
      this.speculating, this.retrieving, this.heat,
      panel("News", "Changes of state, and warnings of the scheduler's log.", this.list));
    section.append(this.body);
  }

  update(told) {
    this.body.hidden = false;
    this.showNodes(told.nodes);
    this.showLink(told.link);
    this.showGauges(told);
    this.showSpeculation(told.stats);
    this.showRetrieval(told.stats);
    for (const chart of this.charts) chart.update(told.history);
    if (told.heat.length) this.showHeat(told.heat);
    this.heat.hidden = !this.rows;
    this.showNews(told.news);
  }

  /* Another scheduler has other connections. */
  forget() {
    this.connections.clear();
  }

  /* Nodes. One that was lost and replaced since the last look is shown as lost, for one look. */

  showNodes(nodes) {
    const name = ({ role, index }) => `${role} ${index}`;
    if (nodes.length !== this.cards.size || nodes.some((each) => !this.cards.has(name(each)))) {
      this.cards.clear();
      const cardOf = (each) => {
        const card = make("li.node", { "data-node": name(each) }, make("b", {}, name(each)), make("span.badge"), make("span.minor"));
        this.cards.set(name(each), card);
        return card;
      };
      const boxes = (own) => [...Map.groupBy(own, ({ host }) => host)].map(([host, there]) => (
        make("div.host", {}, make("h4", {}, host), make("ul", {}, there.map(cardOf)))));
      const [left, right] = SIDES.map((roles) => make("div.half", {}, roles.flatMap(([role, title]) => {
        const own = nodes.filter((each) => each.role === role);
        return own.length ? [make("h3", {}, title), ...boxes(own)] : [];
      })));
      this.plan.replaceChildren(this.wires, left, right, this.link);
    }
    for (const node of nodes) {
      const card = this.cards.get(name(node));
      const [, badge, facts] = card.children;
      const before = this.connections.get(name(node));
      this.connections.set(name(node), node.connection);
      const isSlow = node.state === "serving" && node.times > 1;
      const isReplaced = before && node.connection && node.connection !== before;
      card.dataset.state = isReplaced ? "lost" : isSlow ? "slow" : node.state;
      badge.textContent = isReplaced ? "was lost, and is replaced"
        : isSlow ? `${number(node.times, 1)} times slower than its peers` : STATES[node.state];
      facts.textContent = [
        node.device, node.num_threads && `${node.num_threads} threads`,
        node.role === "expert" && `${number(node.experts)} experts`, node.resident_bytes && bytes(node.resident_bytes),
      ].filter(Boolean).join(" · ");
    }
    this.drawWires();
  }

  /* A line between each node that sends rows and each expert node, in the worse of their states. */
  drawWires() {
    const { left, top } = this.plan.getBoundingClientRect();
    const ends = (roles, side) => [...this.cards].filter(([name]) => roles.includes(name.split(" ")[0])).map(([, card]) => {
      const edge = card.getBoundingClientRect();
      return { x: edge[side] - left, y: edge.top + edge.height / 2 - top, state: card.dataset.state };
    });
    const experts = ends(["expert"], "left");
    this.wires.replaceChildren(...ends(["attention", "stage"], "right").flatMap((from) => experts.map((to) => {
      const middle = (from.x + to.x) / 2;
      return draw("path", {
        d: `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`,
        "data-state": ["lost", "loading", "slow"].find((each) => [from.state, to.state].includes(each)) ?? "serving",
      });
    })));
  }

  showLink({ transport, payload, latency_us: latency, gbps }) {
    const facts = [`rows as ${payload}`, latency && `+ ${latency / 1000} ms one way`, gbps && `${gbps} Gbit/s`];
    const texts = [LINKS[transport] ?? transport, ...facts.filter(Boolean)];
    if (this.link.textContent !== texts.join("")) this.link.replaceChildren(...texts.map((text) => make("span", {}, text)));
  }

  /* Gauges. */

  showGauges({ stats, state, detail, table_version: version, history }) {
    const gauge = (name, value, text) => this.gauges.show(name, value, text);
    gauge("KV cache", stats.kv_cache_usage, `${percent(stats.kv_cache_usage)} of ${number(stats.num_blocks)} blocks`);
    gauge("Waiting", share(stats.num_waiting, stats.max_queued_requests), `${number(stats.num_waiting)} of ${number(stats.max_queued_requests)}`);
    const hits = share(stats.prefix_cache_hits, stats.prefix_cache_queries);
    gauge("Prefix cache", hits, `${percent(hits)} of prompt tokens found`);
    gauge("Balance of experts", share(1, stats.expert_balance), `busiest node ${number(stats.expert_balance, 2)} × the mean`);
    const { at, rates } = lately(history);
    fillFacts(this.counts, [
      ["Engine", detail ? `${state}: ${detail}` : state, "engine"],
      ["Running", number(stats.num_running), "running"],
      ["Tokens/s", at ? number(rates.tokens, 1) : "–", "rate"],
      ["Steps/s", at ? number(rates.steps, 1) : "–"],
      ["Steps", number(stats.num_steps), "steps"],
      ["Tokens written", number(stats.generation_tokens)],
      ["Prompt tokens", number(stats.prompt_tokens)],
      ["Wait for a first token", duration(stats.first_token_s)],
      ["Replayed requests", number(stats.num_replays), "replays"],
      ["Preemptions", number(stats.num_preemptions)],
      ["Experts moved", `${number(stats.expert_migrations)} (placement ${version})`],
    ]);
  }

  showSpeculation(stats) {
    const { num_drafts: drafts, num_draft_tokens: drafted, num_accepted_tokens: accepted } = stats;
    this.speculating.hidden = !drafts;
    if (!drafts) return;
    accepted.slice(0, MAX_POSITIONS).forEach((count, index) => {
      const kept = count / drafts;
      this.speculation.show(index ? `${index + 1} tokens or more` : "One token or more", kept, percent(kept));
    });
    const sum = accepted.reduce((all, each) => all + each, 0);
    const guesses = stats.num_root_hits + stats.num_root_misses;
    fillFacts(this.drafts, [
      ["Tokens a step and sequence", number(1 + sum / drafts, 2), "per-draft"],
      ["Drafted tokens", number(drafted)],
      ["Of those, kept", percent(share(sum, drafted))],
      ...(stats.num_draft_passes ? [
        ["Passes of draft nodes", number(stats.num_draft_passes)],
        ["Beside a step", percent(share(stats.num_overlapped_passes, stats.num_draft_passes))],
      ] : []),
      ...(guesses ? [["Draft ready for the token chosen", percent(stats.num_root_hits / guesses)]] : []),
    ]);
  }

  showRetrieval({ kv, kv_frames_usage: frames }) {
    this.retrieving.hidden = !frames && !Object.values(kv).some(Boolean);
    if (this.retrieving.hidden) return;
    const keys = kv.num_hot_keys + kv.num_read_keys;
    fillFacts(this.kv, [
      ["Rows that chose their keys", number(kv.num_selected_rows), "selected"],
      ["Segments with codebooks", number(kv.num_coded_segments)],
      ["Recall of the best keys", kv.num_recalls ? percent(kv.recall_sum / kv.num_recalls) : "–"],
      ["Blocks saved", number(kv.num_saved_blocks)],
      ["Blocks read whole", number(kv.num_loaded_blocks)],
      ["Chosen keys found in memory", keys ? percent(kv.num_hot_keys / keys) : "–"],
      ["Blocks needed in memory", percent(frames)],
    ]);
  }

  /* Experts. Layers go down, or along if there are more of them than experts. */

  showHeat(heat) {
    this.rows = heat.map((row) => Uint8Array.from(atob(row), (each) => each.charCodeAt(0)));
    const sizes = [this.rows[0].length, this.rows.length];
    this.isTurned = sizes[1] > sizes[0];
    const [wide, high] = this.isTurned ? sizes.reverse() : sizes;
    this.size = wide > 48 ? 10 : 22;
    this.canvas.width = wide * this.size;
    this.canvas.height = high * this.size;
    const context = this.canvas.getContext("2d");
    for (let y = 0; y < high; y++) {
      for (let x = 0; x < wide; x++) {
        const often = this.often(x, y) / 255;
        context.fillStyle = `hsl(${150 - 90 * often} ${45 + 40 * often}% ${16 + 44 * often}%)`;
        context.fillRect(x * this.size, y * this.size, this.size - 1, this.size - 1);
      }
    }
    if (this.cell) this.tellCell(...this.cell);
    else this.pointed.textContent = `${this.rows.length} layers of ${this.rows[0].length} experts: ${this.isTurned ? "a column is a layer" : "a row is a layer"}.`;
  }

  often(x, y) {
    return this.isTurned ? this.rows?.[x]?.[y] : this.rows?.[y]?.[x];
  }

  point({ offsetX, offsetY }) {
    const scale = this.canvas.width / this.canvas.clientWidth / this.size;
    this.tellCell(Math.floor(offsetX * scale), Math.floor(offsetY * scale));
  }

  step(event) {
    const [right, down] = ARROWS[event.key] ?? [];
    if (right === undefined || !this.rows) return;
    event.preventDefault();
    const [x, y] = this.cell ?? [-right, -down];
    this.tellCell(x + right, y + down);
    announce(this.pointed.textContent);
  }

  tellCell(x, y) {
    const often = this.often(x, y);
    if (often === undefined) return;
    this.cell = [x, y];
    const [layer, expert] = this.isTurned ? [x, y] : [y, x];
    const text = `Layer ${layer}, expert ${expert}: chosen ${number(100 * often / 255)} % as often as the layer's favourite.`;
    if (this.pointed.textContent !== text) this.pointed.textContent = text;
  }

  showNews(news) {
    const last = news.at(-1);
    if (last === this.newest) return;
    this.newest = last;
    this.list.replaceChildren(...news.slice(-30).reverse().map(({ at_s: at, is_warning: isWarning, text }) => make(
      `li${isWarning ? ".warning" : ""}`, {}, make("time", {}, new Date(at * 1e3).toLocaleTimeString()), " ", text)));
  }
}

const share = (part, whole) => (whole ? part / whole : 0);
const percent = (value) => `${number(100 * value, value < 0.1 ? 1 : 0)} %`;

/* Return the rates of the last few seconds. */
function lately(history) {
  const [first, last] = [history.at(-6) ?? history[0], history.at(-1)];
  const took = last.at - first.at;
  if (!(took > 0)) return { at: 0, rates: {} };
  const rate = (name) => Math.max(0, last.stats[name] - first.stats[name]) / took;
  return { at: last.at, rates: { tokens: rate("generation_tokens"), steps: rate("num_steps") } };
}

const rateOf = (name) => (history) => history.slice(1).map(({ at, stats }, index) => ({
  at, value: Math.max(0, stats[name] - history[index].stats[name]) / Math.max(at - history[index].at, 1e-3),
}));
const valueOf = (read) => (history) => history.map(({ at, stats }) => ({ at, value: read(stats) }));

const CHARTS = [
  { title: "Tokens/s", points: rateOf("generation_tokens") },
  { title: "Steps/s", points: rateOf("num_steps") },
  { title: "Running and waiting", points: valueOf((stats) => stats.num_running + stats.num_waiting) },
  { title: "KV cache, %", points: valueOf((stats) => 100 * stats.kv_cache_usage) },
];
const SHOWN_S = 300;
const MAX_POSITIONS = 6;

/* Values between none and all, each with its name and a text; those that are there stay. */
class Gauges {
  constructor() {
    this.element = make("div.gauges");
    this.meters = new Map();
  }

  show(name, value, text) {
    if (!this.meters.has(name)) {
      const meter = make("meter", { min: 0, max: 1, "aria-label": name });
      const out = make("span.minor");
      this.element.append(make("div", {}, make("b", {}, name), meter, out));
      this.meters.set(name, { meter, out });
    }
    const { meter, out } = this.meters.get(name);
    meter.value = value;
    out.textContent = text;
  }
}

class Chart {
  constructor({ title, points }) {
    this.points = points;
    this.line = draw("polyline", { class: "line" });
    this.svg = draw("svg", { viewBox: "0 0 300 60", preserveAspectRatio: "none", role: "img", "aria-label": title, class: "chart" }, this.line);
    this.title = title;
    this.now = make("b", {}, "–");
    this.element = make("figure", {}, make("figcaption", {}, title, " ", this.now), this.svg);
  }

  update(history) {
    const points = this.points(history);
    if (!points.length) return;
    const end = points.at(-1).at;
    const begin = Math.max(end - SHOWN_S, Math.min(points[0].at, end - 30));
    const most = Math.max(1e-9, ...points.map(({ value }) => value));
    this.line.setAttribute("points", points.filter(({ at }) => at >= begin)
      .map(({ at, value }) => `${(300 * (at - begin) / (end - begin)).toFixed(1)},${(57 - 54 * value / most).toFixed(1)}`).join(" "));
    const value = points.at(-1).value;
    this.now.textContent = number(value, value < 10 ? 1 : 0);
    this.svg.setAttribute("aria-label", `${this.title}: ${this.now.textContent} now, at most ${number(most, 1)}`);
  }
}

/* The engine: its nodes on the plan's two sides, its gauges, the last minutes, experts, news. */

import { bytes, draw, duration, make, number } from "./dom.js";
import { fillFacts, panel } from "./rally.js";

const STATES = { serving: "serves", loading: "loads", lost: "not there" };
const SIDES = [["attention", "Attention"], ["stage", "Stages"], ["expert", "Experts"], ["draft", "Drafts"]];
const CELL = 9;

export class EngineView {
  constructor(section) {
    this.plan = make("div.plan");
    this.cards = new Map();
    this.connections = new Map();
    this.gauges = make("div.gauges");
    this.meters = new Map();
    this.charts = CHARTS.map((chart) => new Chart(chart));
    this.canvas = make("canvas", { role: "img", "aria-label": "How often each expert is chosen, by layer", mousemove: (event) => this.point(event) });
    this.pointed = make("p.minor", {}, "");
    this.heat = panel("Experts by layer", "A row is an MoE layer, a column an expert; the brighter, the more often it was chosen lately.",
      make("div.scroll", { tabIndex: 0, role: "group", "aria-label": "Experts" }, this.canvas), this.pointed);
    this.counts = make("dl.facts");
    this.list = make("ul.news");
    this.body = make("div.panels", { hidden: true },
      panel("The plan, and its nodes now", "Rows go over the net from every attention node to every expert node, and come back.", this.plan),
      panel("Now", "", this.gauges, this.counts),
      panel("The last minutes", "Since you began to look.", make("div.charts", {}, this.charts.map(({ element }) => element))),
      this.heat,
      panel("News", "Changes of state, and warnings of the scheduler's log.", this.list));
    section.append(this.body);
  }

  update(told) {
    this.body.hidden = false;
    this.showNodes(told.nodes);
    this.showGauges(told);
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
      this.plan.replaceChildren(...SIDES.flatMap(([role, title]) => {
        const own = nodes.filter((each) => each.role === role);
        if (!own.length) return [];
        const cards = own.map((each) => {
          const card = make("li.node", { "data-node": name(each) }, make("b", {}, name(each)), make("span.badge"), make("span.minor"));
          this.cards.set(name(each), card);
          return card;
        });
        return [make(`div.side-${role}`, {}, make("h3", {}, title), make("ul", {}, cards))];
      }));
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
        `${node.device} on ${node.host}`, node.num_threads && `${node.num_threads} threads`,
        node.role === "expert" && `${number(node.experts)} experts`, node.resident_bytes && bytes(node.resident_bytes),
      ].filter(Boolean).join(" · ");
    }
  }

  /* Gauges. */

  showGauges({ stats, state, detail, table_version: version, history }) {
    const share = (part, whole) => (whole ? part / whole : 0);
    const gauge = (name, value, text) => this.gauge(name, value, text);
    const percent = (value) => `${number(100 * value, value < 0.1 ? 1 : 0)} %`;
    gauge("KV cache", stats.kv_cache_usage, `${percent(stats.kv_cache_usage)} of ${number(stats.num_blocks)} blocks`);
    gauge("Waiting", share(stats.num_waiting, stats.max_queued_requests), `${number(stats.num_waiting)} of ${number(stats.max_queued_requests)}`);
    const hits = share(stats.prefix_cache_hits, stats.prefix_cache_queries);
    gauge("Prefix cache", hits, `${percent(hits)} of prompt tokens found`);
    if (stats.num_draft_tokens) {
      const accepted = stats.num_accepted_tokens.reduce((sum, each) => sum + each, 0);
      const kept = share(accepted, stats.num_draft_tokens);
      gauge("Speculation", kept, `${percent(kept)} of drafted tokens kept, ${number(1 + accepted / stats.num_drafts, 2)} tokens a step`);
    }
    gauge("Balance of experts", share(1, stats.expert_balance), `busiest node ${number(stats.expert_balance, 2)} times the mean`);
    const { at, rates } = lately(history);
    fillFacts(this.counts, [
      ["Engine", detail ? `${state}: ${detail}` : state, "engine"],
      ["Running", number(stats.num_running), "running"],
      ["Tokens/s", at ? number(rates.tokens, 1) : "–", "rate"],
      ["Steps/s", at ? number(rates.steps, 1) : "–"],
      ["Steps", number(stats.num_steps), "steps"],
      ["Tokens written", number(stats.generation_tokens)],
      ["Prompt tokens", number(stats.prompt_tokens)],
      ["Next first token", duration(stats.first_token_s)],
      ["Replayed requests", number(stats.num_replays), "replays"],
      ["Preemptions", number(stats.num_preemptions)],
      ["Experts moved", `${number(stats.expert_migrations)}, table ${version}`],
      ...retrieval(stats.kv),
    ]);
  }

  gauge(name, value, text) {
    if (!this.meters.has(name)) {
      const meter = make("meter", { min: 0, max: 1, "aria-label": name });
      const out = make("span.minor");
      this.gauges.append(make("div", {}, make("b", {}, name), meter, out));
      this.meters.set(name, { meter, out });
    }
    const { meter, out } = this.meters.get(name);
    meter.value = value;
    out.textContent = text;
  }

  /* Experts. */

  showHeat(heat) {
    this.rows = heat.map((row) => Uint8Array.from(atob(row), (each) => each.charCodeAt(0)));
    const columns = this.rows[0].length;
    const { canvas } = this;
    canvas.width = columns * CELL;
    canvas.height = this.rows.length * CELL;
    const context = canvas.getContext("2d");
    this.rows.forEach((row, layer) => row.forEach((value, expert) => {
      const share = value / 255;
      context.fillStyle = `hsl(${150 - 90 * share} ${45 + 40 * share}% ${16 + 44 * share}%)`;
      context.fillRect(expert * CELL, layer * CELL, CELL - 1, CELL - 1);
    }));
    if (!this.pointed.textContent) this.pointed.textContent = `${this.rows.length} layers of ${columns} experts.`;
  }

  point({ offsetX, offsetY }) {
    const scale = this.canvas.width / this.canvas.clientWidth;
    const layer = Math.floor(offsetY * scale / CELL);
    const expert = Math.floor(offsetX * scale / CELL);
    const value = this.rows?.[layer]?.[expert];
    if (value === undefined) return;
    this.pointed.textContent = `Layer ${layer}, expert ${expert}: chosen ${number(100 * value / 255)} % as often as the layer's favourite.`;
  }

  showNews(news) {
    const last = news.at(-1);
    if (last === this.newest) return;
    this.newest = last;
    this.list.replaceChildren(...news.slice(-30).reverse().map(({ at_s: at, is_warning: isWarning, text }) => make(
      `li${isWarning ? ".warning" : ""}`, {}, make("time", {}, new Date(at * 1e3).toLocaleTimeString()), " ", text)));
  }
}

/* What long contexts do, where they do something. */
function retrieval(kv) {
  return Object.entries(kv).filter(([, value]) => typeof value === "number" && value > 0).slice(0, 8).map(
    ([name, value]) => [`KV: ${name.replace(/^num_/, "").replaceAll("_", " ")}`, number(value, Number.isInteger(value) ? 0 : 2)]);
}

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

class Chart {
  constructor({ title, points }) {
    this.points = points;
    this.line = draw("polyline", { class: "line" });
    this.svg = draw("svg", { viewBox: "0 0 300 60", preserveAspectRatio: "none", role: "img", class: "chart" }, this.line);
    this.title = title;
    this.now = make("output", {}, "–");
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

/* The rally: one step's timeline, the same step in slow motion, and what other speeds would bring. */

import { announce, button, coalesced, draw, duration, make, number } from "./dom.js";
import { SlowMotion } from "./slow.js";
import { changed, formula, isWait, KINDS, replay, stepOf } from "./stamps.js";

// Of the bars. The timeline is as wide as its place, so that its letters are as large everywhere.
const WIDTH = 1000;
const MIN_WIDTH = 300;
const ROW = 34;
const AXIS = 22;
const SHOWN_STEPS = 60;
const PHASES = ["prepare", "attention", "wait", "sample"];

export class RallyView {
  constructor(section) {
    this.step = null;
    this.isHeld = false;
    this.facts = make("dl.facts");
    this.gantt = draw("svg", { role: "img", "aria-label": "Timeline", class: "gantt" });
    this.zoom = make("input", { type: "range", min: 1, max: 1, value: 4, "aria-label": "Layers shown", input: () => this.drawStep() });
    this.from = make("input", { type: "range", min: 0, max: 1000, value: 0, "aria-label": "Part of the step that is shown", input: () => this.drawStep() });
    this.hold = button("Hold this step", () => {
      this.isHeld = !this.isHeld;
      this.hold.setAttribute("aria-pressed", String(this.isHeld));
      if (this.isHeld) this.slow.begin(this.step);
    }, { "aria-pressed": "false" });
    this.legend = make("p.legend");
    this.slow = new SlowMotion();
    this.bars = draw("svg", { role: "img", "aria-label": "The last steps", class: "bars", viewBox: `0 0 ${WIDTH} 120`, preserveAspectRatio: "none" });
    this.body = make("div.panels", { hidden: true },
      panel("One step, by node", "A node's row is coloured while it works for a micro-batch and grey while it waits. The formula is for nodes that each have a processor of their own.",
        this.facts, make("div.controls", {}, this.hold,
          make("label", {}, "Layers shown ", this.zoom), make("label", {}, "From ", this.from), this.legend),
        this.gantt),
      panel("A step in slow motion", "A micro-batch is a ball: attention serves it over the net, the experts return it. While one is in the air, the next is being hit.", this.slow.element),
      this.whatIf(),
      panel("The last steps", `Up to ${SHOWN_STEPS} steps of the slowest attention node, from left to right.`, phaseLegend(), this.bars));
    this.quiet = make("p.notice", { hidden: true }, "No step has run while you were looking. Ask the model something under ",
      make("a", { href: "#chat" }, "Chat"), ", and come back: or open a second tab.");
    section.append(this.quiet, this.body);
    new ResizeObserver(coalesced(() => this.drawStep()).later).observe(this.gantt);
  }

  update({ sample, steps, fresh }) {
    const step = sample && !this.isHeld ? stepOf(sample) : null;
    if (step) this.show(step);
    this.quiet.hidden = this.step !== null;
    this.body.hidden = this.step === null;
    if (fresh.length) this.drawSteps(steps.slice(-SHOWN_STEPS));
  }

  show(step) {
    const isFirst = this.step === null;
    this.step = step;
    this.zoom.max = Math.max(1, step.layers.length);
    if (isFirst) this.zoom.value = Math.min(4, step.layers.length);
    const total = formula(step);
    const bubble = (role) => {
      const own = step.lanes.filter((lane) => lane.role === role);
      return own.length ? `${number(100 * own.reduce((sum, each) => sum + each.bubble, 0) / own.length)} %` : "–";
    };
    fillFacts(this.facts, [
      ["Step", number(step.step)],
      ["Micro-batches (m)", number(step.numMicroBatches)],
      ["MoE layers (L)", number(step.layers.length)],
      ["T_a, attention", duration(step.attention), "t-a"],
      ["T_e, experts", duration(step.experts), "t-e"],
      ["T_c, one way", duration(step.link), "t-c"],
      ["Measured", duration(step.rally), "measured"],
      ["Formula", total === null ? "–" : `${duration(total)} (${number(100 * total / step.rally)} % of that)`, "formula"],
      ["Attention waits", bubble("attention")],
      ["Experts wait", bubble("expert")],
    ]);
    if (this.legend.childElementCount !== step.numMicroBatches + 2) this.legend.replaceChildren(...legend(step.numMicroBatches));
    this.drawStep();
    this.slow.show(step);
    this.drawWhatIf();
  }

  /* The timeline. */

  drawStep() {
    const { step } = this;
    if (!step) return;
    const share = Math.min(1, Number(this.zoom.value) / Math.max(1, step.layers.length));
    const wide = Math.max(MIN_WIDTH, this.gantt.clientWidth);
    const long = step.took * share;
    const begin = (step.took - long) * Number(this.from.value) / 1000;
    const x = (at) => wide * (at - begin) / long;
    const clip = (at) => Math.max(0, Math.min(wide, x(at)));
    const height = step.lanes.length * ROW + AXIS;
    const parts = [];
    for (let tick = 0; tick <= 4; tick++) {
      const at = wide * tick / 4;
      parts.push(draw("line", { x1: at, x2: at, y1: 0, y2: height - AXIS, class: "tick" }),
        draw("text", { x: at, y: height - 5, "text-anchor": ["start", "middle", "middle", "middle", "end"][tick] }, duration(begin + long * tick / 4)));
    }
    step.lanes.forEach(({ name, spans }, row) => {
      const y = row * ROW;
      for (const span of spans) {
        if (span.end < begin || span.start > begin + long) continue;
        const width = clip(span.end) - clip(span.start);
        const kind = isWait(span.kind) ? "wait" : `busy m${span.microBatch % 4} k-${KINDS[span.kind].replaceAll(" ", "-")}`;
        parts.push(draw("rect", { x: clip(span.start), y: y + 14, width: Math.max(width, 0.4), height: ROW - 17, class: kind },
          draw("title", {}, `${name}: ${KINDS[span.kind]}, layer ${span.layer}, micro-batch ${span.microBatch}, ${duration(span.end - span.start)}`)));
      }
      parts.push(draw("text", { x: 2, y: y + 11, class: "lane" }, name));
    });
    for (const { from, to, read } of share < 0.5 ? step.frames : []) {
      if (read.end < begin || from.span.end > begin + long) continue;
      const row = (node) => step.lanes.findIndex(({ role, index }) => role === node.role && index === node.index) * ROW;
      const isDown = row(to) > row(from);
      parts.push(draw("line", {
        x1: x(from.span.end), y1: row(from) + (isDown ? ROW - 3 : 14), x2: x(Math.min(read.end, from.span.end + (step.link ?? 0))), y2: row(to) + (isDown ? 14 : ROW - 3),
        class: `frame m${read.microBatch % 4}`,
      }));
    }
    this.gantt.setAttribute("viewBox", `0 0 ${wide} ${height}`);
    this.gantt.setAttribute("aria-label", `Timeline of step ${step.step}: ${step.lanes.length} nodes, ${step.numMicroBatches} micro-batches, ${duration(step.took)}`);
    this.gantt.replaceChildren(...parts);
  }

  drawSteps(steps) {
    const slowest = steps.map(({ step, nodes, num_micro_batches: m, num_tokens: rows }) => {
      const all = Object.values(nodes);
      const worst = all.reduce((most, each) => (each.total_s > most.total_s ? each : most), all[0]);
      return { step, m, rows, worst };
    }).filter(({ worst }) => worst);
    const most = Math.max(...slowest.map(({ worst }) => worst.total_s), 1e-9);
    const wide = WIDTH / SHOWN_STEPS;
    this.bars.replaceChildren(...slowest.map(({ step, m, rows, worst }, index) => {
      let top = 120;
      const parts = PHASES.map((phase) => {
        const height = 118 * worst[`${phase}_s`] / most;
        top -= height;
        return draw("rect", { x: index * wide, y: top, width: wide - 2, height, class: `phase-${phase}` });
      });
      return draw("g", {}, ...parts, draw("title", {}, `Step ${step}: ${duration(worst.total_s)}, ${rows} tokens, m = ${m}`));
    }));
    this.bars.setAttribute("aria-label", `The last ${slowest.length} steps; the longest took ${duration(most)}`);
  }

  /* What if. */

  whatIf() {
    const slider = (name, label, low, high, value, show) => {
      const out = make("span.told", {}, show(value));
      const input = make("input", {
        type: "range", min: low, max: high, step: name === "m" ? 1 : "any", value, id: `if-${name}`, "aria-label": label,
        "aria-valuetext": show(value),
        input: () => {
          out.textContent = show(Number(input.value));
          input.setAttribute("aria-valuetext", out.textContent);
          this.drawWhatIf();
        },
        change: () => announce(`Steps would be ${this.verdict}.`),
      });
      this.sliders[name] = input;
      return make("div.slider", {}, make("label", { for: input.id }, label), input, out);
    };
    this.sliders = {};
    this.answers = make("dl.facts");
    const times = (value) => `${number(2 ** value, 2)} times`;
    const panelOf = panel("What if", "The recorded step, replayed with other speeds. Micro-batches of another number share its rows evenly.",
      make("div.sliders", {},
        slider("link", "Time over the link", -4, 6, 0, times),
        slider("attention", "Speed of attention nodes", -3, 3, 0, times),
        slider("expert", "Speed of expert nodes", -3, 3, 0, times),
        slider("m", "Micro-batches", 1, 4, 1, (value) => number(Math.round(value))),
        slider("fixed", "Of a task's time, reading weights", 0, 1, 0.5, (value) => `${number(100 * value)} %`)),
      this.answers);
    this.sliders.m.addEventListener("input", () => { this.mIsChosen = true; });
    return panelOf;
  }

  drawWhatIf() {
    const { step, sliders } = this;
    if (!step?.graph) {
      this.verdict = "unknown";
      fillFacts(this.answers, [["Replay", "not of this step: some of its stamps are missing"]]);
      return;
    }
    if (!this.mIsChosen && Number(sliders.m.value) !== step.numMicroBatches) {
      sliders.m.value = step.numMicroBatches;
      sliders.m.nextSibling.textContent = number(step.numMicroBatches);
      sliders.m.setAttribute("aria-valuetext", number(step.numMicroBatches));
    }
    const value = (name) => Number(sliders[name].value);
    const as = replay(step.graph, step.link ?? 0);
    const link = (step.link ?? 0) * 2 ** value("link");
    const then = replay(changed(step.graph, {
      attentionTimes: 2 ** -value("attention"), expertTimes: 2 ** -value("expert"),
      numMicroBatches: value("m"), fixed: value("fixed"),
    }), link);
    const gain = 100 * (1 - then / as);
    this.verdict = Math.abs(gain) < 0.05 ? "as long" : `${number(Math.abs(gain), 1)} % ${gain > 0 ? "shorter" : "longer"}`;
    fillFacts(this.answers, [
      ["Measured", duration(step.rally)],
      ["Replayed as it was", duration(as), "replayed"],
      ["Replayed so", duration(then), "replayed-so"],
      ["Steps would be", this.verdict],
    ]);
  }
}

export function panel(title, text, ...children) {
  return make("section.panel", { "aria-label": title }, make("h2", {}, title), make("p.minor", {}, text), children);
}

/* Change the texts of a list of facts; its elements stay, so that nothing moves. */
export function fillFacts(list, facts) {
  if (list.childElementCount !== facts.length) {
    list.replaceChildren(...facts.map(() => make("div", {}, make("dt"), make("dd"))));
  }
  facts.forEach(([name, value, id], index) => {
    const [term, told] = list.children[index].children;
    if (term.textContent !== name) term.textContent = name;
    if (told.textContent !== value) told.textContent = value;
    if (id) told.dataset.fact = id;
  });
}

function legend(numMicroBatches) {
  const marks = Array.from({ length: numMicroBatches }, (_, index) => make("span", {}, make(`i.mark.m${index % 4}`), `micro-batch ${index}`));
  return [...marks, make("span", {}, make("i.mark.other"), "inputs, sampling"), make("span", {}, make("i.mark.wait"), "waits")];
}

function phaseLegend() {
  return make("p.legend", {}, PHASES.map((phase) => make("span", {}, make(`i.mark.phase-${phase}`), { prepare: "inputs", attention: "attention", wait: "wait for experts", sample: "sampling" }[phase])));
}

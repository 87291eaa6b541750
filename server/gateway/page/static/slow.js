/* One step in slow motion: nodes on two sides of a net, and what is between them as balls. */

import { button, coalesced, draw, duration, make, number } from "./dom.js";
import { isWait } from "./stamps.js";

const ROW = 74;
const BOX = 104;
const MIN_WIDTH = 300;
const MAX_WIDTH = 800;
// At first a layer takes as long to watch.
const LAYER_S = 2.5;
const MAX_BALLS = 64;

export class SlowMotion {
  constructor() {
    this.step = null;
    this.next = null;
    this.at = 0;
    this.isPlaying = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.before = null;
    this.court = draw("svg", { class: "court", role: "img", "aria-label": "Micro-batches between attention and experts" });
    this.caption = make("p.caption", {}, "");
    this.play = button("", () => this.toggle(), { id: "play" });
    this.place = make("input", { type: "range", min: 0, max: 1000, value: 0, "aria-label": "Moment of the step", input: () => {
      this.at = this.step.took * Number(this.place.value) / 1000;
      this.drawMoment();
    } });
    this.speed = make("input", { type: "range", min: -3, max: 3, step: 0.5, value: 0, "aria-label": "How slowly" });
    this.slowness = make("span.slowness", {}, "");
    this.element = make("div", {}, make("div.controls", {}, this.play, make("label", {}, "Moment ", this.place),
      make("label", {}, "Slower ", this.speed), this.slowness), this.court, this.caption);
    this.label();
    new IntersectionObserver(([{ isIntersecting }]) => {
      this.isSeen = isIntersecting;
      this.run();
    }).observe(this.court);
    new ResizeObserver(coalesced(() => {
      if (!this.step || this.wide === this.widthNow()) return;
      this.lay();
      this.drawMoment();
    }).later).observe(this.court);
  }

  /* A new step is shown once the one before has been played to its end. */
  show(step) {
    if (this.step && this.isPlaying) {
      this.next = step;
      return;
    }
    if (this.step && !this.isPlaying && this.at > 0) return; // somebody looks closely
    this.begin(step);
  }

  begin(step) {
    this.step = step;
    this.next = null;
    this.at = 0;
    this.lay();
    this.drawMoment();
    this.run();
  }

  toggle() {
    this.isPlaying = !this.isPlaying;
    this.label();
    this.run();
  }

  label() {
    this.play.textContent = this.isPlaying ? "Pause" : "Play";
  }

  run() {
    if (this.isRunning || !this.isPlaying || !this.isSeen || !this.step) return;
    this.isRunning = true;
    this.before = null;
    const frame = (now) => {
      this.isRunning = this.isPlaying && this.isSeen && this.court.isConnected;
      if (!this.isRunning) return;
      this.advance(this.before === null ? 0 : Math.min(0.1, (now - this.before) / 1e3));
      this.before = now;
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  advance(passed) {
    const { step } = this;
    const watched = LAYER_S * 2 ** Number(this.speed.value) * Math.max(1, step.layers.length);
    this.at += passed * step.took / watched;
    this.slowness.textContent = `${number(watched / step.took)} times slower`;
    if (this.at > step.took) {
      this.begin(this.next ?? step);
      return;
    }
    this.place.value = 1000 * this.at / step.took;
    this.drawMoment();
  }

  /* As wide as its place, so that letters are as large on a phone. */
  widthNow() {
    return Math.max(MIN_WIDTH, Math.min(MAX_WIDTH, this.court.clientWidth));
  }

  /* What stays for a whole step: the court, and a box for each node. */
  lay() {
    const wide = this.wide = this.widthNow();
    const left = Math.max(BOX / 2 + 10, 0.19 * wide);
    const { lanes } = this.step;
    const side = (role) => lanes.filter((lane) => (role === "expert") === (lane.role === "expert") && lane.role !== "draft");
    const sides = [side("attention"), side("expert")];
    const height = ROW * Math.max(...sides.map((each) => each.length)) + 48;
    this.court.setAttribute("viewBox", `0 0 ${wide} ${height}`);
    this.boxes = new Map();
    const parts = [
      draw("rect", { x: 4, y: 4, width: wide - 8, height: height - 8, rx: 10, class: "ground" }),
      draw("line", { x1: wide / 2, x2: wide / 2, y1: 8, y2: height - 8, class: "net" }),
      draw("text", { x: left, y: 26, "text-anchor": "middle", class: "half" }, "Attention"),
      draw("text", { x: wide - left, y: 26, "text-anchor": "middle", class: "half" }, "Experts"),
    ];
    sides.forEach((own, which) => own.forEach((lane, row) => {
      const x = which ? wide - left : left;
      const y = 36 + (height - 48) * (row + 0.5) / own.length;
      const box = draw("rect", { x: x - BOX / 2, y: y - 25, width: BOX, height: 50, rx: 8, class: "node" });
      const label = draw("text", { x, y: y - 6, "text-anchor": "middle" }, lane.name);
      const doing = draw("text", { x, y: y + 12, "text-anchor": "middle", class: "doing" }, "");
      // Balls of several nodes lie side by side before one.
      const fan = 16 * (row - (own.length - 1) / 2);
      this.boxes.set(lane.name, { x, y, fan: Math.max(-22, Math.min(22, fan)), box, doing, lane });
      parts.push(box, label, doing);
    }));
    this.air = draw("g");
    this.court.replaceChildren(...parts, this.air);
  }

  drawMoment() {
    const { at, step, boxes } = this;
    for (const { box, doing, lane } of boxes.values()) {
      const span = lane.spans.find(({ start, end }) => start <= at && at < end);
      const isBusy = span && !isWait(span.kind);
      box.setAttribute("class", isBusy ? `node busy m${span.microBatch % 4}` : "node");
      doing.textContent = isBusy ? `layer ${span.layer}` : "waits";
    }
    const flying = [];
    for (const { from, to, read } of step.frames) {
      const sent = from.span.end;
      if (at < sent || at >= read.end || flying.length === MAX_BALLS) continue;
      const begin = boxes.get(`${from.role} ${from.index}`);
      const end = boxes.get(`${to.role} ${to.index}`);
      if (!begin || !end) continue;
      // In the air for as long as a frame takes; then it lies before the node until that is free.
      const lands = Math.min(read.end, sent + Math.max(step.link ?? 0, 1e-9));
      const part = Math.min(1, (at - sent) / (lands - sent));
      const edge = (node) => node.x + (node.x < this.wide / 2 ? 1 : -1) * (BOX / 2 + 14);
      const x = edge(begin) + (edge(end) - edge(begin)) * part;
      const y = begin.y + (end.y + begin.fan - begin.y) * part - 26 * Math.sin(Math.PI * part);
      flying.push(draw("g", { class: `ball m${read.microBatch % 4}` },
        draw("circle", { cx: x, cy: y, r: 10 }), draw("text", { x, y: y + 4, "text-anchor": "middle" }, read.microBatch)));
    }
    this.air.replaceChildren(...flying);
    this.caption.textContent = `${duration(at)} of ${duration(step.took)}, step ${step.step}: ${flying.length} ${flying.length === 1 ? "ball is" : "balls are"} in the air or waiting to be hit.`;
  }
}

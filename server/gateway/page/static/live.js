/* What comes from the engine while its views are looked at: asked for, kept for minutes, shown. */

import { getJson } from "./api.js";
import { make, showState } from "./dom.js";
import { EngineView } from "./engine.js";
import { RallyView } from "./rally.js";

const EVERY_MS = 1000;
const PAUSE_MS = 5000;
export const KEPT = 300;

export class Live {
  constructor(rally, engine) {
    this.views = { rally: new RallyView(rally), engine: new EngineView(engine) };
    this.notes = [rally, engine].map((section) => {
      const note = make("p.notice", { role: "status" }, "Looking at the engine …");
      section.prepend(note);
      return note;
    });
    this.cursor = 0;
    this.steps = [];
    this.news = [];
    this.history = [];
    this.shown = null;
    this.due = 0;
    this.isAsking = false;
    document.addEventListener("visibilitychange", () => this.look(this.shown));
  }

  /* Show a view of the engine, or (another name) none. Who does not look asks for nothing. */
  look(name) {
    this.shown = name;
    clearTimeout(this.due);
    if (name in this.views && !document.hidden && !this.isAsking) this.ask();
  }

  async ask() {
    this.isAsking = true;
    let pause = EVERY_MS;
    try {
      this.take(await getJson(`feed?after=${this.cursor}&experts=${this.shown === "engine" ? 1 : 0}`));
      this.tell("");
    } catch (error) {
      const isRefused = error.status === 404 || error.status === 401;
      // A key was not given or is no operator's: asked again when the view is next shown.
      pause = isRefused ? null : PAUSE_MS;
      const why = isRefused ? error.message : `no news of the engine: ${error.message}`;
      this.tell(`${why[0].toUpperCase()}${why.slice(1)}.`);
    }
    this.isAsking = false;
    clearTimeout(this.due);
    if (pause && this.shown in this.views && !document.hidden) this.due = setTimeout(() => this.ask(), pause);
  }

  tell(text) {
    for (const note of this.notes) {
      note.hidden = !text;
      if (note.textContent !== text) note.textContent = text;
    }
  }

  take(feed) {
    if (feed.cursor < this.cursor) { // another scheduler's
      this.steps = [];
      this.views.engine.forget();
    }
    this.cursor = feed.cursor;
    this.steps = [...this.steps, ...feed.steps].slice(-KEPT);
    this.news = [...this.news, ...feed.news].slice(-KEPT);
    this.history = [...this.history, { at: performance.now() / 1e3, stats: feed.stats }].slice(-KEPT);
    const told = { ...feed, steps: this.steps, fresh: feed.steps, news: this.news, history: this.history };
    for (const view of Object.values(this.views)) view.update(told);
    showState(feed.state);
  }
}

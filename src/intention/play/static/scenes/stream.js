// Stream: points arrive; a state of constant size that forgets, one that does not, and a window of attention.

import { element, shown } from "../dom.js";
import { Plot } from "../plot.js";

const LINES = { forgetting: ["Intention, forgetting", "c-intention"], all: ["Intention, all points", "c-sigma_intention"], window: ["Attention, a window", "c-attention"] };

export function make(view) {
  const { about, state } = view, most = about.fields.at.high;
  const now = new Plot(about.panels.now, { x: [-1, 1], y: [-3, 3], width: 480, height: 300 });
  const errors = new Plot(about.panels.errors, { x: [0, most], y: [0, 2], width: 480, height: 300 });
  const legend = element("span", { class: "legend" }, ...Object.values(LINES).map(([text, look]) => element("span", {}, element("span", { class: `dot ${look}` }), text)), element("span", {}, element("span", { class: "dash" }), "truth"));
  now.figure.querySelector("figcaption").append(legend);
  view.panels.append(now.figure, errors.figure);
  const body = element("tbody");
  view.panels.append(element("div", { class: "card wide" }, element("table", { class: "told" },
    element("thead", {}, element("tr", {}, ...["", "mean squared error so far", "numbers kept"].map((text) => element("th", { scope: "col" }, text)))), body)));
  errors.draggable({ scrub: (x) => { stop(); view.set({ at: Math.round(Math.max(about.fields.at.low, Math.min(most, x))) }); } });
  errors.root.classList.add("scrub");
  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; run.textContent = "Run"; };
  const run = view.button("Run", () => {
    if (timer) { stop(); return; }
    run.textContent = "Stop";
    if (state.at >= most) view.set({ at: about.fields.at.low });
    timer = setInterval(() => { if (state.at >= most) stop(); else view.set({ at: state.at + 1 }); }, 70);
  });
  view.button("Next point", () => { stop(); view.set({ at: Math.min(most, state.at + 1) }); });

  return {
    draw(answer) {
      const high = Math.max(0.5, Math.min(6, 1.15 * Math.max(...Object.values(answer.errors).flat().slice(6).filter((x) => x !== null))));
      errors.range([0, most], [0, +high.toPrecision(1) < high ? Math.ceil(high * 2) / 2 : +high.toPrecision(1)]);
      now.curve("truth", answer.x, answer.true, "truth");
      for (const [name, [, look]] of Object.entries(LINES)) {
        now.curve(name, answer.x, answer.found[name], look);
        const list = answer.errors[name];
        errors.curve(`${name}-later`, list.map((_, i) => i + 1), list, `faint ${look}`);
        errors.curve(name, list.slice(0, state.at - 1).map((_, i) => i + 1), list.slice(0, state.at - 1), look);
      }
      const last = answer.points.slice(-60);
      now.points(last, { still: true, look: () => "small" });
      last.forEach((_, i) => { now.layers.points.children[i].style.opacity = Math.max(0.12, state.forget ** (last.length - 1 - i)); });
      errors.item("marks", "now", "line", { x1: errors.sx(state.at), x2: errors.sx(state.at), y1: errors.area.y, y2: errors.area.y + errors.area.height, class: "cursor-line" });
      body.replaceChildren(...Object.entries(LINES).map(([name, [text, look]]) => element("tr", {}, element("th", { scope: "row" }, element("span", { class: `dot ${look}` }), text), element("td", {}, shown(answer.mean[name], 3)), element("td", {}, String(answer.memory[name])))));
      now.number.value = `${state.at} points`;
    },
    close: stop,
  };
}

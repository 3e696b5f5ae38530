// Line: five computations on the same points, and what the fit says of each point without it.

import { post } from "../ask.js";
import { shown } from "../dom.js";
import { Plot } from "../plot.js";

const NAMES = ["attention", "linear_attention", "kernel", "sigma_intention", "intention"];

export function make(view) {
  const { about, state } = view;
  const [[, xl, xh], [, yl, yh]] = about.fields.points.columns;
  const ranges = { x: [xl, xh], y: [yl, yh] };
  const plots = Object.fromEntries(Object.entries(about.panels).map(([name, panel]) => [name, new Plot(panel, ranges)]));
  for (const plot of Object.values(plots)) view.panels.append(plot.figure);
  const edit = {
    move: (i, x, y) => { state.points[i] = [x, y]; view.set({ points: state.points }); },
    add: (x, y) => { if (state.points.length < about.fields.points.most) view.set({ points: [...state.points, [x, y]] }); },
    remove: (i) => view.set({ points: state.points.filter((_, k) => k !== i) }),
  };
  for (const name of NAMES) plots[name].draggable(edit);
  plots.attention.root.setAttribute("tabindex", "0");
  plots.attention.root.setAttribute("aria-label", "Attention: Enter adds a point, arrows move the one in focus, Delete removes it");
  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; infinity.textContent = "α → ∞"; };
  view.button("Choose α for me", async () => {
    stop();
    try { view.set({ ...(await post("/choose/line", state)), scale: "one" }); } catch (error) { view.complain(error.message); }
  });
  const infinity = view.button("α → ∞", () => {
    if (timer) { stop(); return; }
    infinity.textContent = "Stop";
    const from = state.alpha >= 6 ? -4 : state.alpha;
    view.set({ scale: "alpha", alpha: from });
    timer = setInterval(() => {
      const next = Math.min(6, +(state.alpha + 0.1).toFixed(2));
      view.set({ alpha: next });
      if (next >= 6) stop();
    }, 50);
  });
  view.root.append();
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.textContent = "Click adds a point, dragging moves it, a double click or Delete removes it. All pictures share the points. Σ = KᵀK / N + α I; the gap is the distance to the dashed limit.";
  queueMicrotask(() => view.panels.after(hint));

  return {
    sketch() {
      for (const name of NAMES) plots[name].points(state.points, { focus: name === "attention" });
      for (const one of view.root.querySelectorAll('.mark[data-of="scale"]')) one.textContent = state.scale === "alpha" ? "(1+α) " : "";
    },
    draw(answer) {
      for (const name of NAMES) {
        plots[name].curve("own", answer.x, answer.found[name]);
        plots[name].band("own", answer.x, answer.found[name], answer.band[name]);
      }
      // the limits, thin, where they are being approached
      for (const [name, limit] of [["intention", "linear_attention"], ["sigma_intention", "attention"]]) {
        plots[name].curve("limit", answer.x, state.scale === "alpha" ? answer.found[limit] : null, `limit c-${limit}`);
        const gap = answer.distance[name];
        plots[name].number.value = state.scale === "alpha" && gap !== undefined ? `gap ${shown(gap, 2)}` : "";
      }
      const { left_out: rest } = answer, plot = plots.left_out;
      plot.forget("marks", (id) => Number(id) < rest.length);
      rest.forEach((r, i) => {
        const [x] = state.points[i] ?? [0];
        plot.item("marks", String(i), "line", { x1: plot.sx(x), x2: plot.sx(x), y1: plot.sy(0), y2: plot.sy(Math.max(-9, Math.min(9, r ?? 0))), class: "stem c-intention" });
      });
      plot.points(rest.map((r, i) => [(state.points[i] ?? [0])[0], Math.max(-2, Math.min(2, r ?? 0))]), { still: true, look: () => "small" });
      const rms = rest.length ? Math.sqrt(rest.reduce((sum, r) => sum + r * r, 0) / rest.length) : null;
      plot.number.value = `RMS ${shown(rms, 3)}`;
      view.tell({ points: `${state.points.length}`, "leave-one-out error": shown(rms, 3) });
    },
    close: stop,
  };
}

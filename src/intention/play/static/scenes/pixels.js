// Pixels: a picture of which some pixels are seen; the models complete the rest. The mask and the ink are part of the link.

import { shown } from "../dom.js";
import { Plot } from "../plot.js";

const BRUSH = { reveal: 1.2, hide: 1.6, draw: 1.3 };

export function make(view) {
  const { about, state } = view, side = 28;
  const look = { x: [0, side], y: [0, side], square: true, bare: true, axes: false };
  const source = new Plot({ title: "What is seen", colour: "text" }, look);
  const plots = Object.fromEntries(Object.entries(about.panels).map(([name, panel]) => [name, new Plot(panel, look)]));
  for (const plot of [source, ...Object.values(plots)]) view.panels.append(plot.figure);
  source.root.classList.add("paper");
  source.root.setAttribute("tabindex", "0");
  source.root.setAttribute("aria-label", "What is seen: arrows move the brush, Enter uses it");
  let truth = null, place = [14, 14];
  const bits = () => { const out = new Uint8Array(side * side); [...state.seen].forEach((c, i) => { const v = parseInt(c, 16); for (let k = 0; k < 4; k++) out[4 * i + k] = (v >> (3 - k)) & 1; }); return out; };
  const pack = (mask) => { let out = ""; for (let i = 0; i < mask.length; i += 4) out += ((mask[i] << 3) | (mask[i + 1] << 2) | (mask[i + 2] << 1) | mask[i + 3]).toString(16); return out; };
  const ink = () => (state.drawn ? [...state.drawn].map((c) => parseInt(c, 16)) : new Array(side * side).fill(0));

  function brush(x, y) {
    const mask = bits(), drawing = state.hand === "draw", paint = drawing ? ink() : null, row = side - y, size = BRUSH[state.hand];
    for (let r = 0; r < side; r++) for (let c = 0; c < side; c++) {
      const far = Math.hypot(c + 0.5 - x, r + 0.5 - row);
      if (far > size) continue;
      const i = r * side + c;
      if (drawing) paint[i] = Math.max(paint[i], Math.round(15 * Math.min(1, 1.5 * (1 - far / size) + 0.25)));
      else mask[i] = state.hand === "reveal" ? 1 : 0;
    }
    view.set(drawing ? { drawn: paint.map((v) => v.toString(16)).join("") } : { seen: pack(mask) });
  }
  source.draggable({ scrub: brush });
  source.root.addEventListener("keydown", (event) => {
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (arrows) { place = place.map((v, k) => Math.max(0.5, Math.min(side - 0.5, v + arrows[k]))); cursor(); }
    else if (event.key === "Enter" || event.key === " ") brush(...place);
    else return;
    event.preventDefault();
  });
  const cursor = () => source.item("marks", "cursor", "circle", { cx: source.sx(place[0]), cy: source.sy(place[1]), r: 14, class: "cursor" });
  const some = (count) => {
    const mask = bits(), hidden = [...mask.keys()].filter((i) => !mask[i]);
    for (let k = 0; k < count && hidden.length; k++) mask[hidden.splice(Math.floor(Math.random() * hidden.length), 1)[0]] = 1;
    view.set({ seen: pack(mask) });
  };
  view.button("Reveal 30 more", () => some(30));
  view.button("Hide all", () => view.set({ seen: "0".repeat(196) }));
  view.button("Draw my own", () => view.set({ drawn: "0".repeat(784), hand: "draw", seen: "0".repeat(196).replace(/0/g, (_, i) => (i % 2 ? "a" : "5")) }));
  view.button("Back to the glyph", () => view.set({ drawn: "", hand: "reveal" }), "quiet");

  function picture(values, alpha = () => 255, hidden = null) {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const [page, pen] = dark ? [[23, 28, 34], [236, 238, 241]] : [[255, 255, 255], [27, 31, 36]];
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = side;
    const context = canvas.getContext("2d"), data = context.createImageData(side, side);
    values.forEach((v, i) => {
      const t = Math.max(0, Math.min(1, v ?? 0));
      data.data.set(hidden && !hidden[i] ? (dark ? [44, 66, 92, 255] : [206, 221, 240, 255]) : [...page.map((p, k) => Math.round(p + (pen[k] - p) * t)), alpha(i)], 4 * i);
    });
    context.putImageData(data, 0, 0);
    return canvas.toDataURL();
  }

  const seen = () => {
    const values = state.drawn ? ink().map((v) => v / 15) : truth;
    if (values) source.picture(picture(values, undefined, bits()), "crisp");
    source.number.value = `${bits().reduce((a, b) => a + b, 0)} of 784`;
  };
  return {
    sketch: seen,
    draw(answer) {
      truth = answer.truth;
      seen();
      for (const [name, plot] of Object.entries(plots)) {
        plot.picture(picture(answer.found[name] ?? new Array(side * side).fill(0)), "crisp");
        plot.number.value = answer.found[name] ? `error ${shown(answer.error[name], 2)}` : "nothing seen";
      }
      view.tell({ "pixels seen": String(answer.count), ...Object.fromEntries(Object.entries(answer.error).map(([name, e]) => [about.panels[name].title, shown(e, 2)])) });
    },
  };
}

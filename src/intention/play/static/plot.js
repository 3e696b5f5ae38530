// One picture: axes, curves, bands, images, points that can be dragged with mouse, finger or keys.

import { element, formula, set, svg } from "./dom.js";

const HIT = 16; // of a finger, in units of the picture

export class Plot {
  // about: title, formula, colour. x, y: ranges. square: as high as wide. bare: no numbers at the axes.
  constructor(about, { x, y, square = false, bare = false, width = 360, height, axes = true }) {
    this.x = x; this.y = y;
    this.width = width; this.height = height ?? (square ? width : 236);
    this.edge = bare ? { left: 4, right: 4, top: 4, bottom: 4 } : { left: 30, right: 8, top: 8, bottom: 22 };
    if (square && !bare) this.height = this.width - this.edge.left - this.edge.right + this.edge.top + this.edge.bottom;
    this.colour = about.colour || "text";
    this.root = svg("svg", { viewBox: `0 0 ${this.width} ${this.height}`, class: "plot", role: "group", "aria-label": about.title });
    const clip = `clip-${about.title.replace(/\W/g, "")}-${Plot.count++}`;
    const { left, right, top, bottom } = this.edge;
    this.area = { x: left, y: top, width: this.width - left - right, height: this.height - top - bottom };
    this.root.append(svg("defs", {}, svg("clipPath", { id: clip }, svg("rect", this.area))));
    this.root.append(svg("rect", { ...this.area, class: "area" }));
    this.layers = {};
    for (const name of ["images", "grid", "bands", "curves", "marks", "points"]) {
      const clipped = name === "points" || name === "grid" ? {} : { "clip-path": `url(#${clip})` };
      this.layers[name] = svg("g", { class: name, ...clipped });
      this.root.append(this.layers[name]);
    }
    if (axes) this.grid(bare);
    this.number = element("output", { class: "number" });
    this.figure = element("figure", { class: "card" },
      element("figcaption", {}, element("b", {}, element("span", { class: `dot c-${this.colour}` }), about.title), this.number,
        about.formula ? formula(about.formula) : null),
      this.root);
    this.items = new Map();
  }

  sx(x) { return this.area.x + ((x - this.x[0]) / (this.x[1] - this.x[0])) * this.area.width; }
  sy(y) { return this.area.y + this.area.height - ((y - this.y[0]) / (this.y[1] - this.y[0])) * this.area.height; }

  at(event) {
    const box = this.root.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * this.width, py = ((event.clientY - box.top) / box.height) * this.height;
    const x = this.x[0] + ((px - this.area.x) / this.area.width) * (this.x[1] - this.x[0]);
    const y = this.y[0] + ((this.area.y + this.area.height - py) / this.area.height) * (this.y[1] - this.y[0]);
    return { x, y, px, py };
  }

  grid(bare) {
    this.layers.grid.replaceChildren();
    for (const [range, vertical] of [[this.x, true], [this.y, false]]) {
      for (const tick of ticks(range)) {
        const place = vertical ? this.sx(tick) : this.sy(tick);
        const { x, y, width, height } = this.area;
        const line = vertical ? { x1: place, x2: place, y1: y, y2: y + height } : { y1: place, y2: place, x1: x, x2: x + width };
        this.layers.grid.append(svg("line", { ...line, class: tick === 0 ? "zero" : "" }));
        if (bare) continue;
        const where = vertical ? { x: place, y: y + height + 14, "text-anchor": "middle" } : { x: x - 5, y: place + 3.5, "text-anchor": "end" };
        this.layers.grid.append(svg("text", where, !vertical && this.named ? this.named(tick) : String(tick).replace("-", "−")));
      }
    }
  }

  relabel(named) { // what stands at the ticks of y
    this.named = named;
    this.grid(false);
  }

  range(x, y) { // another one: the grid is drawn again
    if (String([x, y]) === String([this.x, this.y])) return;
    this.x = x; this.y = y;
    this.grid(this.edge.left < 10);
  }

  item(layer, id, tag, attributes) {
    const key = `${layer}/${id}`;
    let made = this.items.get(key);
    if (!made) { made = svg(tag); this.layers[layer].append(made); this.items.set(key, made); }
    set(made, attributes);
    return made;
  }

  forget(layer, keep = () => false) {
    for (const [key, made] of this.items) {
      const [own, ...id] = key.split("/");
      if (own === layer && !keep(id.join("/"))) { made.remove(); this.items.delete(key); }
    }
  }

  path(xs, ys) {
    let out = "", pen = "M";
    xs.forEach((x, i) => {
      if (ys[i] === null || ys[i] === undefined) { pen = "M"; return; }
      const y = Math.max(-1e4, Math.min(1e4, this.sy(ys[i])));
      out += `${pen}${this.sx(x).toFixed(1)} ${y.toFixed(1)}`; pen = "L";
    });
    return out;
  }

  curve(id, xs, ys, look = "") {
    return this.item("curves", id, "path", { d: ys ? this.path(xs, ys) : "", class: `curve ${look || `c-${this.colour}`}` });
  }

  band(id, xs, ys, half, look = "") {
    if (!ys || !half) { this.item("bands", id, "path", { d: "" }); return; }
    const up = this.path(xs, ys.map((y, i) => (y === null || half[i] === null ? null : y + half[i])));
    const down = this.path([...xs].reverse(), [...ys].map((y, i) => (y === null || half[i] === null ? null : y - half[i])).reverse());
    this.item("bands", id, "path", { d: up ? `${up}L${down.slice(1)}Z` : "", class: `band ${look || `c-${this.colour}`}` });
  }

  // Values on a grid whose slow index is x; paint(value) gives [r, g, b, a].
  image(values, grid, paint) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = grid;
    const context = canvas.getContext("2d"), data = context.createImageData(grid, grid);
    for (let x = 0; x < grid; x++) for (let y = 0; y < grid; y++) data.data.set(paint(values[x * grid + y]), 4 * ((grid - 1 - y) * grid + x));
    context.putImageData(data, 0, 0);
    this.picture(canvas.toDataURL());
  }

  picture(url, look = "") {
    this.item("images", "heat", "image", { href: url, ...this.area, preserveAspectRatio: "none", class: look });
  }

  // rows of [x, y]; look(i) gives the classes of a point, ring(i) whether it has a ring
  points(rows, { look = () => "", ring = () => false, shape = () => 0, focus = false, label = (i) => `point ${i + 1}`, still = false } = {}) {
    this.rows = rows;
    const layer = this.layers.points;
    while (layer.children.length > rows.length) layer.lastChild.remove();
    while (layer.children.length < rows.length) {
      layer.append(svg("g", { class: "point" }, svg("circle", { r: HIT, class: "hit" }), svg("circle", { r: 9, class: "ring" }), svg("path", { class: "body" })));
    }
    rows.forEach((row, i) => {
      const made = layer.children[i];
      made.setAttribute("transform", `translate(${this.sx(row[0]).toFixed(2)} ${this.sy(row[1]).toFixed(2)})`);
      set(made, {
        class: `point ${look(i)}${ring(i) ? " ringed" : ""}${still ? " still" : ""}`,
        tabindex: still ? null : focus ? 0 : -1, role: still ? null : "button",
        "aria-label": still ? null : `${label(i)}: ${row.slice(0, 2).map((x) => x.toFixed(2)).join(", ")}`,
      });
      made.lastChild.setAttribute("d", SHAPES[shape(i)]);
    });
  }

  // model: move(i, x, y), add(x, y), remove(i); each may be missing. step: of an arrow key, in parts of the range.
  draggable({ move, add, remove, scrub }) {
    let held = null, from = null, tapped = { i: -1, when: 0 };
    const index = (event) => {
      const point = event.target.closest?.(".point");
      return point && !point.classList.contains("still") ? [...this.layers.points.children].indexOf(point) : -1;
    };
    const inside = (value, [low, high]) => Math.round(Math.min(Math.max(value, low), high) * 1000) / 1000;
    const place = (event) => { const p = this.at(event); return [inside(p.x, this.x), inside(p.y, this.y)]; };
    this.root.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      const i = index(event);
      from = this.at(event);
      if (i >= 0 && move) { held = i; this.layers.points.children[i].focus?.({ preventScroll: true }); this.layers.points.children[i].classList.add("held"); }
      else if (scrub) { held = "scrub"; scrub(...place(event)); }
      if (held !== null) { this.root.setPointerCapture(event.pointerId); event.preventDefault(); }
    });
    this.root.addEventListener("pointermove", (event) => {
      if (held === "scrub") scrub(...place(event));
      else if (held !== null) move(held, ...place(event));
    });
    const end = (event) => {
      const moved = from && Math.hypot(this.at(event).px - from.px, this.at(event).py - from.py) > 4;
      const i = held;
      if (Number.isInteger(i)) {
        this.layers.points.children[i]?.classList.remove("held");
        const again = !moved && tapped.i === i && event.timeStamp - tapped.when < 450;
        tapped = { i: moved ? -1 : i, when: event.timeStamp };
        if (again && remove) { remove(i); tapped.i = -1; }
      } else if (held === null && !moved && from && add && event.type === "pointerup") {
        const { x, y, width, height } = this.area;
        if (from.px >= x && from.px <= x + width && from.py >= y && from.py <= y + height) add(...place(event));
      }
      held = null; from = null;
    };
    this.root.addEventListener("pointerup", end);
    this.root.addEventListener("pointercancel", end);
    this.root.addEventListener("keydown", (event) => {
      const i = index(event);
      const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (i >= 0 && arrows && move) {
        const size = (event.shiftKey ? 0.1 : 0.01), row = this.rows[i];
        move(i, inside(row[0] + arrows[0] * size * (this.x[1] - this.x[0]), this.x), inside(row[1] + arrows[1] * size * (this.y[1] - this.y[0]), this.y));
      } else if (i >= 0 && remove && (event.key === "Delete" || event.key === "Backspace")) {
        remove(i);
        (this.layers.points.children[Math.min(i, this.layers.points.children.length - 1)] ?? this.root).focus();
      } else if (add && (event.key === "Enter" || event.key === "+")) {
        const row = i >= 0 ? this.rows[i] : [(this.x[0] + this.x[1]) / 2, (this.y[0] + this.y[1]) / 2];
        add(inside(row[0] + (i >= 0 ? 0.04 : 0) * (this.x[1] - this.x[0]), this.x), inside(row[1], this.y));
      } else return;
      event.preventDefault();
    });
  }
}
Plot.count = 0;

const SHAPES = ["M-4.6 0a4.6 4.6 0 1 0 9.2 0a4.6 4.6 0 1 0 -9.2 0Z", "M0 -5.8L5.4 0L0 5.8L-5.4 0Z", "M0 -5.8L5.6 4.2L-5.6 4.2Z"];

function ticks([low, high]) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((size) => size >= rough * 0.8);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9; k++) out.push(+(k * step).toPrecision(12) || 0);
  return out;
}

// A diverging scale: blue below 0, orange above, the page's colour at 0.
export function diverging(far) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const middle = dark ? [24, 29, 36] : [250, 250, 250], low = [47, 127, 209], high = [224, 138, 0];
  return (value) => {
    if (value === null) return [0, 0, 0, 0];
    const t = Math.max(-1, Math.min(1, value / far)), end = t < 0 ? low : high, part = Math.abs(t) ** 0.8;
    return [...middle.map((m, i) => Math.round(m + (end[i] - m) * part)), 255];
  };
}

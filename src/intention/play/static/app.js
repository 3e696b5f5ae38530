// Shows one scene at a time: what the address says is what is shown, and every change goes into the address.

import { Asker, post } from "./ask.js";
import { controls } from "./controls.js";
import { element, light } from "./dom.js";
import { save } from "./save.js";
import { decode, defaults, encode } from "./state.js";

const FIRST = "map";
const MODULES = {
  map: () => import("./scenes/map.js"), line: () => import("./scenes/line.js"), plane: () => import("./scenes/plane.js"),
  classes: () => import("./scenes/classes.js"), sine: () => import("./scenes/sine.js"), rabbit: () => import("./scenes/rabbit.js"),
  pixels: () => import("./scenes/pixels.js"), stream: () => import("./scenes/stream.js"),
};
const PAPER = "https://arxiv.org/abs/2305.10203";
const main = document.querySelector("#main"), dialog = document.querySelector("#dialog"), toast = document.querySelector("#toast");
window.play = { answers: 0, times: [], busy: () => true }; // for tests and the benchmark: what is shown, and how long each answer took

class View {
  constructor(about, state, module, scenes) {
    Object.assign(this, { about, state, scenes, fields: about.fields });
    this.root = element("section", { class: `scene ${about.name}` });
    this.problem = element("p", { class: "problem", role: "alert", hidden: true });
    this.panels = element("div", { class: "panels" });
    this.buttons = element("div", { class: "buttons" });
    this.controls = controls(this.fields, state, (name, value) => this.set({ [name]: value }));
    this.facts = element("dl", { class: "facts" });
    this.asker = new Asker(`/answer/${about.name}`, (...heard) => this.hear(...heard), (text) => this.complain(text));
    this.scene = module.make(this);
    this.root.append(...this.intro(), this.problem,
      element("div", { class: "work" }, this.panels, this.sheet()));
  }

  intro() {
    const { title, lead, ask, paper, docs } = this.about;
    return [element("header", { class: "intro" },
      element("h1", {}, title), element("p", { class: "lead" }, lead), element("p", { class: "ask" }, element("b", {}, "Try: "), ask),
      element("p", { class: "links" },
        element("button", { type: "button", class: "quiet", onclick: () => this.showCode() }, "Show the code"),
        element("button", { type: "button", class: "quiet", onclick: () => this.copy(location.href, "The link is copied.") }, "Copy link"),
        element("button", { type: "button", class: "quiet", onclick: () => save(this.panels, this.about.name) }, "Save picture"),
        element("button", { type: "button", class: "quiet", onclick: () => this.set(defaults(this.fields)) }, "Start over"),
        element("span", {}, "Paper: ", element("a", { href: PAPER, rel: "noreferrer", target: "_blank" }, paper)),
        element("span", {}, "Docs: ", element("button", { type: "button", class: "link", onclick: () => this.showDocs(docs) }, docs.page))))];
  }

  // Beside the pictures; on a phone a sheet at the lower edge that opens.
  sheet() {
    const open = element("button", { type: "button", class: "sheet", "aria-expanded": "false", onclick: () => {
      open.setAttribute("aria-expanded", String(made.classList.toggle("raised")));
    } }, "Controls");
    const made = element("aside", { "aria-label": "Controls" }, open, this.buttons, this.controls.root, this.facts);
    return made;
  }

  button(text, act, look = "") {
    const made = element("button", { type: "button", class: look, onclick: act }, text);
    this.buttons.append(made);
    return made;
  }

  // Facts beside the picture: { name: text }.
  tell(facts) {
    this.facts.replaceChildren(...Object.entries(facts).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
  }

  set(changes, quiet = false) {
    Object.assign(this.state, changes);
    if (!quiet) for (const name of Object.keys(changes)) light(this.root, name);
    this.controls.show();
    this.scene.sketch?.(this.state);
    this.asker.ask(this.state);
    clearTimeout(this.writing);
    this.writing = setTimeout(() => this.write(), 120); // browsers limit how often an address may be written
    window.play.busy = () => this.asker.busy || this.writing !== null;
  }

  write() {
    this.writing = null;
    const link = encode(this.about, this.state);
    if (this.asker.closed || link === location.hash) return;
    history.replaceState(null, "", link);
  }

  hear(answer, state, since) {
    this.problem.hidden = true;
    this.scene.draw(answer, state);
    Object.assign(window.play, { answer, state, scene: this.about.name, answers: window.play.answers + 1 });
    window.play.times.push(performance.now() - since);
    this.root.classList.add("drawn");
  }

  complain(text) {
    this.problem.textContent = text;
    this.problem.hidden = false;
  }

  async copy(text, said) {
    try { await navigator.clipboard.writeText(text); say(said); } catch { say(text); }
  }

  async showCode() {
    try {
      const { code } = await post(`/code/${this.about.name}`, this.state);
      const command = `intention play --export DIR '${encode(this.about, this.state)}'`;
      open("The code of this picture",
        element("p", {}, "These lines compute what is shown; ", element("code", {}, "found"), " holds the numbers."),
        element("pre", { tabindex: 0 }, code),
        element("div", { class: "buttons" }, element("button", { type: "button", onclick: () => this.copy(code, "The code is copied.") }, "Copy the code")),
        element("p", {}, "The same, with the picture, as files:"), element("pre", { tabindex: 0 }, command));
    } catch (error) { this.complain(error.message); }
  }

  showDocs({ page, texts }) {
    open(page, ...Object.values(texts).map((text) => element("pre", { class: "doc", tabindex: 0 }, text)));
  }

  close() { this.asker.close(); clearTimeout(this.writing); this.scene.close?.(); }
}

function open(title, ...body) {
  document.querySelector("#dialog-title").textContent = title;
  document.querySelector("#dialog-body").replaceChildren(...body);
  dialog.showModal();
}

function say(text) {
  toast.textContent = text;
  toast.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => toast.classList.remove("shown"), 2500);
}

document.querySelector("#dialog-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
document.querySelector("#skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

async function start() {
  const scenes = await (await fetch("/scenes")).json();
  let view = null, turn = 0;
  const nav = document.querySelector("#nav");
  nav.append(...Object.values(scenes).map(({ name, title }) => element("a", { href: `#${name}`, "data-scene": name }, title)));

  async function show() {
    if (view && location.hash === encode(view.about, view.state)) return;
    const { scene, state } = decode(scenes, location.hash, FIRST), mine = ++turn;
    const module = await MODULES[scene.name]();
    if (mine !== turn) return;
    view?.close();
    view = new View(scene, state, module, scenes);
    main.replaceChildren(view.root);
    document.title = `${scene.title} · Intention play`;
    for (const link of nav.children) {
      if (link.dataset.scene === scene.name) { link.setAttribute("aria-current", "page"); link.scrollIntoView({ block: "nearest", inline: "center" }); }
      else link.removeAttribute("aria-current");
    }
    view.set({}, true);
  }
  addEventListener("hashchange", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.set({}, true));
  await show();
}

start().catch((error) => main.replaceChildren(element("p", { class: "problem", role: "alert" }, `The page could not start: ${error.message}`)));

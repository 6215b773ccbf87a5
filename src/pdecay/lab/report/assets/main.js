// What is shown, and who draws it. Python has put all numbers into DATA; this file only filters.

const DATA = JSON.parse($("data").textContent);

const view = {
  study: null,
  mode: "means", // one point for each setting, or "runs"
  axis: "log",
  crop: true, // leave room for what has not collapsed
  hidden: { methods: new Set(), norms: new Set() },
  order: { by: 1, down: true },
  run: null,
};
let highlights = []; // functions that mark a run in each plot

const isShown = ({ method, norm }) =>
  !view.hidden.methods.has(method) && (norm === null || !view.hidden.norms.has(norm));
const shownPoints = (mode = view.mode) => view.study.points[mode].filter(isShown);
const pointColour = ({ method, norm }) =>
  norm === null ? view.study.methods[method].colour : view.study.norms[norm].colour;

/** What a tooltip says about a point. */
function tipOf(point) {
  const seeds = point.runs.map((run) => view.study.runs[run].seed);
  const rows = [
    ["accuracy", accuracyText(point)],
    ["sparsity", percent(point.sparsity)],
    ["trade-off", point.tradeoff.toFixed(2)],
    [seeds.length > 1 ? "seeds" : "seed", seeds.join(", ")],
  ];
  if (point.diverged) rows.push(["diverged", `${point.diverged} more`]);
  return [glued(point.name), rows];
}

function choosePoint(point) {
  chooseRun(point.runs.includes(view.run) ? view.run : point.runs[0]);
}

function chooseRun(index) {
  view.run = index;
  drawRun(index);
  for (const highlight of highlights) highlight(index);
}

/** Draw all that the filters decide. */
function draw() {
  hideTip();
  highlights = [];
  const { study } = view;
  const points = shownPoints();
  const place = study.adamw[view.mode];
  const dense = place === null ? null : study.points[view.mode][place];
  const bars = view.mode === "means";
  const beyond = scatter($("accuracy"), points, {
    measure: "accuracy", label: "validation accuracy, %", dense, staircase: true, bars,
    name: "Accuracy against sparsity",
  });
  scatter($("tradeoff"), points, {
    measure: "tradeoff", label: "accuracy % + sparsity", dense, ringed: true, name: "Trade-off",
  });
  const what = bars && study.hasSeeds
    ? "Each point is a setting, the mean over its seeds with one standard deviation. " : "Each point is a run. ";
  $("accuracy-note").replaceChildren(
    `${what}The steps are the Pareto front of what is shown; points on it are bold. ` +
    (beyond ? `${beyond} that collapsed ${beyond === 1 ? "lies" : "lie"} beyond the plot, at its edge.` : ""));
  drawAbove($("above"), shownPoints("means"));
  drawContours($("contours"), study.contours);
  drawSettings($("settings"), shownPoints("means"));
  for (const highlight of highlights) highlight(view.run);
}

const marker = (d, fill) =>
  s("svg", { viewBox: "-1.3 -1.3 2.6 2.6", "aria-hidden": "true" }, s("path", { d, style: { fill } }));

/** A button that is on or off. */
function chip(label, on, toggle, picture = null) {
  const button = h("button", { type: "button", class: "chip", "aria-pressed": String(on), on: {
    click: () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(now));
      toggle(now);
      draw();
    },
  } }, picture, h("span", {}, label));
  return button;
}

function drawFilters() {
  const { study } = view;
  const hide = (kind, place) => (on) => view.hidden[kind][on ? "delete" : "add"](place);
  const fill = (host, chips) => {
    host.replaceChildren(host.querySelector("legend"), ...chips);
    host.hidden = !chips.length;
  };
  fill($("methods"), study.methods.map((method, place) => chip(
    method.name, true, hide("methods", place),
    marker(method.marker, method.byNorm ? "var(--soft)" : colour(method.colour)))));
  fill($("norms"), study.norms.map((norm, place) => chip(
    norm.label, true, hide("norms", place), marker(DATA.dot, colour(norm.colour)))));
  fill($("views"), [
    study.hasSeeds && chip("means over seeds", view.mode === "means", (on) => { view.mode = on ? "means" : "runs"; }),
    chip("logarithmic axis", view.axis === "log", (on) => { view.axis = on ? "log" : "linear"; }),
    chip("crop what collapsed", view.crop, (on) => { view.crop = on; }),
  ].filter(Boolean));
}

function drawFacts() {
  const { study } = view;
  $("about").replaceChildren(study.about);
  $("notes").replaceChildren(...study.notes.map((note) => h("li", {}, note)));
  $("facts").replaceChildren(...study.facts.map((fact) => h("button", {
    type: "button", class: "fact", on: { click: () => choosePoint(study.points.means[fact.point]) },
  }, h("span", { class: "what" }, fact.what), h("span", { class: "value" }, fact.value),
  h("span", { class: "how" }, glued(fact.how)))));
  $("origin").replaceChildren(study.origin);
}

function openStudy(place) {
  view.study = DATA.studies[place];
  view.mode = "means";
  view.hidden = { methods: new Set(), norms: new Set() };
  for (const points of Object.values(view.study.points)) {
    points.forEach((point, index) => { point.index = index; });
  }
  for (const node of document.querySelectorAll(".needs-runs")) node.hidden = !view.study.runs.length;
  drawFacts();
  drawFilters();
  drawScale($("scale"), view.study.contours);
  drawDiverged(view.study.failed);
  view.run = view.study.chosen;
  draw();
  drawRun(view.run);
}

function start() {
  const picker = $("study");
  picker.append(...DATA.studies.map((study, place) => h("option", { value: place }, study.title)));
  picker.hidden = DATA.studies.length < 2;
  picker.addEventListener("change", () => openStudy(Number(picker.value)));
  document.title = `pdecay report: ${DATA.studies.map(({ task }) => task).join(", ")}`;

  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.scheme ?? (dark.matches ? "dark" : "light")) === "dark";
  const name = () => { $("theme").textContent = isDark() ? "Light" : "Dark"; };
  $("theme").addEventListener("click", () => {
    root.dataset.scheme = isDark() ? "light" : "dark";
    name();
  });
  dark.addEventListener("change", name);
  name();

  $("filters").addEventListener("submit", (event) => event.preventDefault());
  openStudy(0);
  let width = root.clientWidth;
  window.addEventListener("resize", () => {
    if (root.clientWidth === width) return; // a phone's address bar changes the height only
    width = root.clientWidth;
    draw();
    drawRun(view.run);
  });
}

start();

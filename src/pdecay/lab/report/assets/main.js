// The state of the page and the filters. Python computed all numbers in DATA.

const DATA = JSON.parse($("data").textContent);

const view = {
  experiment: null,
  mode: "means", // one point for each setting, or "runs"
  axis: "log",
  crop: true, // draw points far below the others at the edge
  hidden: { methods: new Set(), pRanges: new Set() },
  order: { by: 1, down: true },
  run: null,
};
let highlights = []; // one function for each plot, which marks the chosen run

const isShown = ({ method, pRange }) =>
  !view.hidden.methods.has(method) && (pRange === null || !view.hidden.pRanges.has(pRange));
const shownPoints = (mode = view.mode) => view.experiment.points[mode].filter(isShown);
const pointColour = ({ method, pRange }) =>
  pRange === null ? view.experiment.methods[method].colour : view.experiment.pRanges[pRange].colour;

/** Title and rows of a point's tooltip. */
function tipOf(point) {
  const seeds = point.runs.map((run) => view.experiment.runs[run].seed);
  const rows = [
    ["validation accuracy", accuracyText(point)],
    point.test_accuracy !== null && ["test accuracy", accuracyText(point, "test_")],
    ["sparsity", percent(point.sparsity)],
    ["trade-off", point.tradeoff.toFixed(2)],
    [seeds.length > 1 ? "seeds" : "seed", seeds.join(", ")],
    point.diverged && ["diverged seeds", String(point.diverged)],
    point.collapsed && ["collapsed", "below half of the best accuracy"],
  ];
  return [noBreak(point.name), rows.filter(Boolean)];
}

function choosePoint(point) {
  chooseRun(point.runs.includes(view.run) ? view.run : point.runs[0]);
}

function chooseRun(index) {
  view.run = index;
  drawRun(index);
  for (const highlight of highlights) highlight(index);
}

/** Draw everything that depends on the filters. */
function draw() {
  hideTip();
  highlights = [];
  const { experiment } = view;
  const points = shownPoints();
  const place = experiment.dense[view.mode];
  const dense = place === null ? null : experiment.points[view.mode][place];
  const bars = view.mode === "means";
  const beyond = scatter($("accuracy"), points, {
    measure: "accuracy", label: "validation accuracy, %", dense, staircase: true, bars,
    name: "Accuracy against sparsity",
  });
  scatter($("tradeoff"), points, {
    measure: "tradeoff", label: "accuracy % + sparsity", dense, ringed: true, name: "Trade-off",
  });
  const meaning = bars && experiment.hasSeeds
    ? "Each point is a setting, the mean over its seeds, with one standard deviation. " : "Each point is a run. ";
  $("accuracy-note").replaceChildren(
    `${meaning}The staircase is the Pareto front of the points shown; points on it are opaque. ` +
    (beyond ? `${beyond} far below the plot: drawn hollow at its edge.` : ""));
  $("levels-note").replaceChildren(
    "For each method, the most accurate setting with at least this sparsity, chosen on the validation split. " +
    `Numbers: accuracy in percent on the ${experiment.hasTest ? "test" : "validation"} split. ` +
    "All methods are compared at the same levels, but the number of settings tried differs. " +
    "Bold: the best method of the column. Grey: a collapsed network.");
  drawLevels($("levels"), shownPoints("means"));
  drawContours($("contours"), experiment.contours);
  drawSettings($("settings"), shownPoints("means"));
  for (const highlight of highlights) highlight(view.run);
}

const marker = (d, fill) =>
  s("svg", { viewBox: "-1.3 -1.3 2.6 2.6", "aria-hidden": "true" }, s("path", { d, style: { fill } }));

/** A toggle button. */
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
  const { experiment } = view;
  const hide = (kind, place) => (on) => view.hidden[kind][on ? "delete" : "add"](place);
  const fill = (host, chips) => {
    host.replaceChildren(host.querySelector("legend"), ...chips);
    host.hidden = !chips.length;
  };
  fill($("methods"), experiment.methods.map((method, place) => chip(
    method.name, true, hide("methods", place),
    marker(method.marker, method.colouredByP ? "var(--soft)" : colour(method.colour)))));
  fill($("pRanges"), experiment.pRanges.map((pRange, place) => chip(
    pRange.label, true, hide("pRanges", place), marker(DATA.dot, colour(pRange.colour)))));
  fill($("views"), [
    experiment.hasSeeds && chip("means over seeds", view.mode === "means", (on) => { view.mode = on ? "means" : "runs"; }),
    chip("logarithmic axis", view.axis === "log", (on) => { view.axis = on ? "log" : "linear"; }),
    chip("crop outliers", view.crop, (on) => { view.crop = on; }),
  ].filter(Boolean));
}

function drawFacts() {
  const { experiment } = view;
  $("about").replaceChildren(experiment.about);
  $("notes").replaceChildren(...experiment.notes.map((note) => h("li", {}, note)));
  $("facts").replaceChildren(...experiment.facts.map((fact) => h("button", {
    type: "button", class: "fact", on: { click: () => choosePoint(experiment.points.means[fact.point]) },
  }, h("span", { class: "title" }, fact.title), h("span", { class: "value" }, fact.value),
  h("span", { class: "detail" }, noBreak(fact.detail)))));
  $("origin").replaceChildren(experiment.origin);
}

function openExperiment(place) {
  view.experiment = DATA.experiments[place];
  view.mode = "means";
  view.hidden = { methods: new Set(), pRanges: new Set() };
  for (const points of Object.values(view.experiment.points)) {
    points.forEach((point, index) => { point.index = index; });
  }
  for (const node of document.querySelectorAll(".needs-runs")) node.hidden = !view.experiment.runs.length;
  drawFacts();
  drawFilters();
  drawScale($("scale"), view.experiment.contours);
  drawDiverged(view.experiment.failed);
  view.run = view.experiment.initialRun;
  draw();
  drawRun(view.run);
}

function start() {
  const picker = $("experiment");
  picker.append(...DATA.experiments.map((experiment, place) => h("option", { value: place }, experiment.title)));
  picker.hidden = DATA.experiments.length < 2;
  picker.addEventListener("change", () => openExperiment(Number(picker.value)));
  document.title = `pdecay report: ${DATA.experiments.map(({ task }) => task).join(", ")}`;

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
  openExperiment(0);
  let width = root.clientWidth;
  window.addEventListener("resize", () => {
    if (root.clientWidth === width) return; // on a phone, the address bar changes only the height
    width = root.clientWidth;
    draw();
    drawRun(view.run);
  });
}

start();

// The tables: accuracy above a given sparsity, all settings, and the runs that diverged.

function drawAbove(host, points) {
  const { study } = view;
  const rows = [];
  study.methods.forEach((method, index) => {
    const own = points.filter((point) => point.method === index);
    if (!own.length) return;
    rows.push({ name: method.name, points: own, part: false });
    const norms = [...new Set(own.map(({ norm }) => norm))].filter((norm) => norm !== null).sort((a, b) => a - b);
    if (norms.length < 2) return;
    for (const norm of norms) {
      rows.push({ name: `p = ${study.norms[norm].label}`, points: own.filter((point) => point.norm === norm), part: true });
    }
  });
  const cells = rows.map((row) => DATA.levels.map((level) => above(row.points, level)));
  const tops = DATA.levels.map((_, column) => Math.max(
    ...cells.filter((_, place) => !rows[place].part).map((row) => row[column]?.accuracy ?? -Infinity)));
  host.replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "sparsity ≥"),
      ...DATA.levels.map((level) => h("th", { scope: "col" }, `${100 * level} %`)))),
    h("tbody", {}, ...rows.map((row, place) => h("tr", { class: row.part ? "part" : null },
      h("th", { scope: "row" }, row.name),
      ...cells[place].map((point, column) => aboveCell(point, point && point.accuracy === tops[column])))))));
}

function aboveCell(point, best) {
  if (!point) return h("td", {}, "–");
  const button = h("button", { type: "button", on: {
    click: () => choosePoint(point),
    mouseenter: () => showTip(middle(button), ...tipOf(point)),
    mouseleave: hideTip,
    focus: () => button.matches(":focus-visible") && showTip(middle(button), ...tipOf(point)),
    blur: hideTip,
  } }, point.accuracy.toFixed(2));
  const deviation = point.spread === null ? null : h("span", { class: "deviation" }, `±${point.spread.toFixed(2)}`);
  return h("td", { class: best ? "best" : null }, button, deviation);
}

const COLUMNS = [
  ["setting", (point) => point.name, (point) => point.name],
  ["accuracy, %", (point) => point.accuracy, (point) => accuracyText(point).replace(" %", "")],
  ["sparsity, %", (point) => point.sparsity, (point) => (100 * point.sparsity).toFixed(2)],
  ["trade-off", (point) => point.tradeoff, (point) => point.tradeoff.toFixed(2)],
  ["seeds", (point) => point.runs.length, (point) => String(point.runs.length)],
];

function drawSettings(host, points) {
  const { by, down } = view.order;
  const value = COLUMNS[by][1];
  const sign = down ? -1 : 1;
  const ordered = [...points].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    return sign * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
  });
  const heads = COLUMNS.map(([name], column) => h("th", {
    scope: "col", "aria-sort": column !== by ? null : down ? "descending" : "ascending",
  }, h("button", { type: "button", on: { click: () => {
    view.order = { by: column, down: column === by ? !down : column > 0 };
    drawSettings(host, points);
  } } }, name)));
  host.replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, ...heads)),
    h("tbody", {}, ...ordered.map((point) => h("tr", {},
      h("td", { class: "words" }, h("button", { type: "button", on: { click: () => choosePoint(point) } }, glued(point.name))),
      ...COLUMNS.slice(1).map(([, , text]) => h("td", {}, text(point))))))));
}

function drawDiverged(runs) {
  $("diverged").hidden = !runs.length;
  $("diverged-list").replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, ...["setting", "seed", "after step"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...runs.map((run) => h("tr", {},
      h("td", { class: "words" }, glued(run.name)), h("td", {}, String(run.seed)),
      h("td", {}, run.step === null ? "–" : grouped(run.step)))))));
}

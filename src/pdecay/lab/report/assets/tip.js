// The tooltip, and marks that respond to mouse, touch and keyboard.

/** Show a title and rows of [name, value] next to a position on the screen. */
function showTip(place, title, rows) {
  const tip = $("tip");
  tip.replaceChildren(
    h("b", {}, title),
    h("dl", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const page = document.documentElement;
  const gap = 14;
  let left = place.x + gap;
  if (left + width > page.clientWidth - 8) left = place.x - gap - width;
  left = Math.max(8, Math.min(left, page.clientWidth - width - 8));
  let top = place.y - height - gap;
  if (top < 8) top = place.y + gap;
  tip.style.left = `${left + window.scrollX}px`;
  tip.style.top = `${top + window.scrollY}px`;
}

function hideTip() {
  $("tip").hidden = true;
  for (const node of document.querySelectorAll(".near")) node.classList.remove("near");
}

const middle = (node) => {
  const box = node.getBoundingClientRect();
  return { x: box.left + box.width / 2, y: box.top + box.height / 2 };
};

/**
 * Make the marks of a plot interactive: the mark nearest to the pointer shows its tooltip, a click
 * or tap chooses it. The tab key stops once in each plot; the arrow keys move between marks.
 *
 * marks: [{x, y, node, tip: () => [title, rows], choose: () => void}], x and y in the SVG's pixels.
 */
function interactive(svg, marks) {
  const reach = 28; // pixels; large enough for touch
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    let found = null;
    let distance = reach;
    for (const mark of marks) {
      const away = Math.hypot(mark.x - x, mark.y - y);
      if (away < distance) [found, distance] = [mark, away];
    }
    return found;
  };
  const show = (mark) => {
    hideTip();
    mark.node.classList.add("near");
    showTip(middle(mark.node), ...mark.tip());
  };
  const hover = (event) => {
    const mark = nearest(event);
    if (mark) show(mark);
    else hideTip();
    svg.style.cursor = mark ? "pointer" : "";
  };
  svg.addEventListener("pointermove", hover);
  svg.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") hideTip();
  });
  svg.addEventListener("click", (event) => {
    const mark = nearest(event);
    if (!mark) return;
    mark.choose();
    show(mark);
  });

  const ordered = [...marks].sort((a, b) => a.x - b.x || b.y - a.y);
  ordered.forEach((mark, place) => {
    const { node } = mark;
    node.setAttribute("tabindex", place === 0 ? "0" : "-1");
    node.setAttribute("role", "button");
    const [title, rows] = mark.tip();
    node.setAttribute("aria-label", [title, ...rows.map((row) => row.join(" "))].join(", "));
    node.addEventListener("focus", () => {
      if (node.matches(":focus-visible")) show(mark);
    });
    node.addEventListener("blur", hideTip);
    node.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, Home: -1e9, End: 1e9 };
      if (event.key in steps) {
        const to = Math.max(0, Math.min(ordered.length - 1, place + steps[event.key]));
        node.setAttribute("tabindex", "-1");
        ordered[to].node.setAttribute("tabindex", "0");
        ordered[to].node.focus();
      } else if (event.key === "Enter" || event.key === " ") {
        mark.choose();
      } else if (event.key === "Escape") {
        hideTip();
      } else {
        return;
      }
      event.preventDefault();
    });
  });
}

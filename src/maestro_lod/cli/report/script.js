"use strict";
// Hovering, and the budget slider. Texts from files are only ever set as text, never as HTML.

const NS = "http://www.w3.org/2000/svg";

function add(parent, name, attributes) {
  const node = parent.ownerDocument.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return parent.appendChild(node);
}

function element(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

const tooltip = element("div");
tooltip.id = "tooltip";
tooltip.setAttribute("role", "status");
tooltip.hidden = true;
document.body.append(tooltip);

function showTooltip(title, rows, clientX, clientY) {
  const lines = rows.map(([colour, name, value]) => {
    const line = element("p", undefined, colour);
    line.append(element("i"), element("span", name), element("b", value));
    return line;
  });
  tooltip.replaceChildren(element("strong", title), ...lines);
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = clientX + 24 + width < document.documentElement.clientWidth ? clientX + 16 : clientX - 16 - width;
  const top = clientY - height - 12 > 8 ? clientY - height - 12 : clientY + 16;
  // in the page, not in the window, so that it scrolls with its chart
  tooltip.style.left = `${scrollX + Math.max(8, Math.min(left, document.documentElement.clientWidth - width - 8))}px`;
  tooltip.style.top = `${scrollY + Math.max(8, Math.min(top, innerHeight - height - 8))}px`;
}

// Every chart carries its hits: [x, title, [[colour, name, value, y], …]] in units of its viewBox.
for (const plot of document.querySelectorAll(".plot")) {
  const svg = plot.querySelector("svg");
  const { by, hits, y: [bottom, top] } = JSON.parse(plot.querySelector("script").textContent);
  const view = svg.viewBox.baseVal;
  const layer = add(svg, "g", { "aria-hidden": "true" });
  let current = -1;

  const hide = () => {
    layer.replaceChildren();
    tooltip.hidden = true;
    current = -1;
  };
  const show = (index) => {
    const [x, title, rows] = hits[index];
    current = index;
    layer.replaceChildren();
    if (by === "x") add(layer, "line", { class: "guide", x1: x, x2: x, y1: top, y2: bottom });
    for (const [colour, , , y] of rows) {
      add(layer, "circle", { class: `here ${colour}`, cx: x, cy: y, r: 4.5 });
    }
    const box = svg.getBoundingClientRect();
    const scale = box.width / view.width;
    showTooltip(title, rows, box.left + x * scale, box.top + Math.min(...rows.map((row) => row[3])) * scale);
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) * view.width) / box.width;
    const y = ((event.clientY - box.top) * view.width) / box.width;
    const distances = hits.map((hit) => (by === "x" ? Math.abs(hit[0] - x) : Math.hypot(hit[0] - x, hit[2][0][3] - y)));
    const index = distances.indexOf(Math.min(...distances));
    return by === "x" || distances[index] < 40 ? index : -1;
  };
  const point = (event) => {
    const index = nearest(event);
    if (index < 0) hide();
    else show(index);
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", `${plot.parentNode.querySelector("b").textContent}: arrow keys read its values`);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    show(Math.max(0, Math.min(hits.length - 1, current < 0 ? (step > 0 ? 0 : hits.length - 1) : current + step)));
  });
}

function quantity(value) {
  for (const [size, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= 0.9995 * size) return `${Number((value / size).toPrecision(3))} ${prefix}`;
  }
  return `${Number(value.toPrecision(3))}`;
}

for (const frontier of document.querySelectorAll(".frontier")) {
  const { dense, names, points, full, places } = JSON.parse(frontier.querySelector(":scope > script").textContent);
  const controls = frontier.querySelector(".controls");
  const slider = controls.querySelector("input[type=range]");
  const output = controls.querySelector("output");
  const facts = controls.querySelectorAll("dd");
  const layers = frontier.querySelectorAll(".ranks tbody tr");
  const charts = [...frontier.querySelectorAll(".plot")].map((plot) => {
    const svg = plot.querySelector("svg");
    const { hits, x, y: [bottom, top] } = JSON.parse(plot.querySelector("script").textContent);
    const beyond = add(svg, "rect", { class: "beyond", y: top, height: bottom - top });
    const chosen = add(svg, "circle", { class: "chosen", r: 7.5 });
    return { hits, axis: x, beyond, chosen };
  });

  const update = () => {
    const kind = controls.querySelector("input[type=radio]:checked").value;
    const costs = points.map((point) => point.cost[kind]);
    const [least, most] = [Math.min(...costs), Math.max(...costs)];
    const budget = slider.value === slider.max ? most : least * (most / least) ** (slider.value / slider.max);
    let best = -1;
    points.forEach((point, index) => {
      if (point.cost[kind] <= budget && (best < 0 || point.merit > points[best].merit)) best = index;
    });
    const share = dense[kind] ? ` · ${(budget / dense[kind]).toPrecision(2)}× dense` : "";
    output.textContent = `${quantity(budget)} ${names[kind]}${share}`;
    slider.setAttribute("aria-valuetext", output.textContent);
    facts.forEach((fact, index) => { fact.textContent = points[best].facts[index]; });
    layers.forEach((row, index) => {
      const rank = points[best].ranks[index];
      row.querySelector(".bar > div").style.width = `${full[index] ? (100 * rank) / full[index] : 0}%`;
      row.querySelector(".number b").textContent = rank;
    });
    for (const { hits, axis: [name, low, high, start, end], beyond, chosen } of charts) {
      const place = hits[places[name][best]];
      chosen.setAttribute("cx", place[0]);
      chosen.setAttribute("cy", place[2][0][3]);
      const x = start + (Math.log(budget / low) / Math.log(high / low)) * (end - start);
      beyond.setAttribute("x", x);
      beyond.setAttribute("width", name === kind ? end - x : 0);
    }
  };
  controls.addEventListener("input", update);
  controls.hidden = false;
  update();
}

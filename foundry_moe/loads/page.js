"use strict";
// Draws the two heat maps from the numbers in #data: hundredths of the layer's mean load.
const data = JSON.parse(document.getElementById("data").textContent);
const { layers, ends, total, points } = data;
const experts = total[0].length;
const byId = (id) => document.getElementById(id);

// blue below the mean, white at it, red above: as the picture that the callback draws
function colour(hundredths) {
  const x = Math.min(hundredths, 200) / 100 - 1;
  const [from, to] = x < 0 ? [[247, 247, 247], [33, 102, 172]] : [[247, 247, 247], [178, 24, 43]];
  return from.map((start, i) => Math.round(start + (to[i] - start) * Math.abs(x)));
}

const ink = () => getComputedStyle(document.body).color;
const says = (value) => (value >= 999 ? "10 times the mean or more" : (value / 100).toFixed(2) + " of the mean");

// rows of numbers as cells; names of rows on the left, of columns below; what a cell is, under the canvas
function draw(id, rows, rowNames, columnNames, rowWord, tell) {
  const canvas = byId(id), columns = rows[0].length, left = 64, bottom = 34;
  const width = Math.max(2, Math.min(48, 1040 / columns)), height = Math.max(4, Math.min(26, 640 / rows.length));
  const shownWidth = left + width * columns + 8, shownHeight = height * rows.length + bottom;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = shownWidth * ratio;
  canvas.height = shownHeight * ratio;
  canvas.style.width = shownWidth + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  rows.forEach((row, r) => row.forEach((value, c) => {
    pen.fillStyle = "rgb(" + colour(value).join(",") + ")";
    const x = Math.floor(left + c * width), y = Math.floor(r * height); // whole pixels: no seams between cells
    pen.fillRect(x, y, Math.ceil(left + (c + 1) * width) - x, Math.ceil((r + 1) * height) - y);
    if (width >= 34 && height >= 16) {
      pen.fillStyle = Math.abs(value - 100) > 60 ? "#fff" : "#222";
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillText((value / 100).toFixed(2), left + (c + 0.5) * width, r * height + height / 2 + 4);
    }
  }));
  pen.fillStyle = ink();
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "right";
  const everyRow = Math.ceil(14 / height);
  rowNames.forEach((name, r) => { if (r % everyRow === 0) pen.fillText(name, left - 6, r * height + height / 2 + 4); });
  pen.textAlign = "center";
  const everyColumn = Math.ceil(44 / width);
  columnNames.forEach((name, c) => {
    if (c % everyColumn === 0) pen.fillText(name, left + (c + 0.5) * width, height * rows.length + 15);
  });
  pen.textAlign = "left";
  pen.fillText(rowWord, left, height * rows.length + 30);
  canvas.onmousemove = (event) => {
    const box = canvas.getBoundingClientRect(), scale = shownWidth / box.width;
    const c = Math.floor(((event.clientX - box.left) * scale - left) / width);
    const r = Math.floor(((event.clientY - box.top) * scale) / height);
    if (rows[r] !== undefined && rows[r][c] !== undefined) byId(id + "-under").textContent = tell(r, c) + ": " + says(rows[r][c]);
  };
  canvas.dataset.drawn = rows.length + "x" + columns;
}

const numbers = Array.from({ length: experts }, (_, e) => String(e));

function drawLayers() {
  const at = Number(byId("when").value);
  const rows = at === 0 ? total : points[at - 1];
  byId("span").textContent = at === 0 ? "the whole run" : "up to batch " + ends[at - 1];
  draw("layers", rows, layers.map((layer) => "layer " + layer), numbers, "expert", (r, c) => "layer " + layers[r] + ", expert " + c);
}

function drawTime() {
  const chosen = Number(byId("layer").value);
  const batches = ends.map(String);
  const all = chosen < 0;
  byId("time-says").textContent = all ? "the fullest expert of each layer" : "each expert of the layer";
  const rows = all
    ? layers.map((_, l) => points.map((point) => Math.max(...point[l])))
    : numbers.map((_, e) => points.map((point) => point[chosen][e]));
  const names = all ? layers.map((layer) => "layer " + layer) : numbers;
  draw("time", rows, names, batches, "batch", (r, c) => (all ? "layer " + layers[r] : "expert " + r) + ", up to batch " + ends[c]);
}

function drawScale() {
  const canvas = byId("scale"), pen = canvas.getContext("2d");
  canvas.width = 200;
  canvas.height = 12;
  for (let i = 0; i < 200; i++) {
    pen.fillStyle = "rgb(" + colour(i).join(",") + ")";
    pen.fillRect(i, 0, 1, 12);
  }
}

// #when=3&layer=1 is the third point, and the second layer of the page
const asked = new URLSearchParams(location.hash.slice(1));
byId("when").max = ends.length;
byId("when").value = asked.get("when") || 0;
byId("layer").append(new Option("all layers", -1), ...layers.map((layer, l) => new Option("layer " + layer, l)));
const wanted = Number(asked.get("layer") ?? -1);
byId("layer").value = layers[wanted] === undefined ? -1 : wanted;
byId("when").oninput = drawLayers;
byId("layer").onchange = drawTime;
drawLayers();
drawTime();
drawScale();

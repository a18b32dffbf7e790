"use strict";
(() => {
  const data = JSON.parse(document.getElementById("mxamp-data").textContent);
  const charts = [...document.querySelectorAll(".chart[data-chart]")];

  // ---------------------------------------------------------------- values under the pointer
  const number = (value) => Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
  const range = (ends) => ends.map(number).join(" to ");

  function rowAt(rows, step) {
    let low = 0;
    let high = rows.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (rows[middle][1] < step) low = middle + 1;
      else high = middle;
    }
    return rows[low];
  }

  function describe(run, step) {
    const row = rowAt(run.rows, step);
    const [first, last] = row;
    const parts = [first === last ? `step ${number(first)}` : `steps ${number(first)} to ${number(last)}`];
    data.names.forEach((name, i) => {
      if (row[i + 2]) parts.push(`${name} ${range(row[i + 2])}`);
    });
    const skips = row[row.length - 1];
    if (skips) parts.push(first === last ? "skipped" : `${skips} skipped`);
    return (data.runs.length > 1 ? `${run.label}\n` : "") + parts.join("\n");
  }

  const cursors = charts.map((chart) => {
    const cursor = document.createElement("div");
    cursor.className = "cursor";
    cursor.hidden = true;
    chart.querySelector(".area").append(cursor);
    return cursor;
  });
  const values = document.createElement("output");
  values.className = "values";
  values.hidden = true;
  let step = null;

  function show(chart, at) {
    const [low, high] = data.across;
    step = Math.min(Math.max(at, low), high);
    const share = high > low ? (step - low) / (high - low) : 0.5;
    for (const cursor of cursors) {
      cursor.style.left = `${100 * share}%`;
      cursor.hidden = false;
    }
    values.textContent = data.runs.map((run) => describe(run, step)).join("\n");
    values.classList.toggle("left", share > 0.5);
    values.hidden = false;
    if (values.parentNode !== chart) chart.append(values);
  }

  function hide() {
    values.hidden = true;
    for (const cursor of cursors) cursor.hidden = true;
  }

  if (data.runs) {
    const [low, high] = data.across;
    for (const chart of charts) {
      const area = chart.querySelector(".area");
      const move = (event) => {
        const box = area.getBoundingClientRect();
        show(chart, Math.round(low + ((event.clientX - box.left) / box.width) * (high - low)));
      };
      area.addEventListener("pointermove", move);
      area.addEventListener("pointerdown", move);
      area.addEventListener("pointerleave", hide);
      chart.tabIndex = 0;
      chart.addEventListener("blur", hide);
      chart.addEventListener("keydown", (event) => {
        const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (event.key === "Escape") hide();
        if (!way) return;
        event.preventDefault();
        const stride = Math.max(1, Math.round((high - low) / 600));
        show(chart, step === null ? low : step + way * stride);
      });
    }
  }

  // ---------------------------------------------------------------- filters for long tables
  for (const box of document.querySelectorAll(".scroll")) {
    const rows = [...box.querySelectorAll("tbody tr")];
    if (rows.length < 8) continue;
    const label = document.createElement("label");
    label.className = "filter";
    const input = document.createElement("input");
    input.type = "search";
    const count = document.createElement("span");
    label.append("Filter", input, " ", count);
    box.before(label);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const content = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => content.includes(word));
        shown += !row.hidden;
      }
      count.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
    });
  }
  // Print folded sections too.
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details")) fold.open = true;
  });
})();

"use strict";
(() => {
  const pictures = JSON.parse(document.getElementById("pictures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const unpack = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));

  const digits = (number) => (number >= 99.95 ? number.toFixed(0) : number.toPrecision(3).replace(/\.?0+$/, ""));
  const scaled = (number, base, units) => {
    let at = 0;
    while (number >= 999.5 && at < units.length - 1) { number /= base; at += 1; }
    return digits(number) + units[at];
  };
  const minutes = (s) => `${Math.floor(s / 60)}m${String(s % 60).padStart(2, "0")}s`;
  const time = (ms) => (ms >= 60000 ? minutes(Math.round(ms / 1000)) : scaled(ms * 1000, 1000, ["µs", "ms", "s"]));
  const bytes = (many) => scaled(many, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
  const clock = (ms, fine) => new Date(ms).toISOString().slice(11, fine ? 23 : 19);
  const ranks = (some) => (some.length === 1 ? `rank ${some[0]}` : `ranks ${some[0]}–${some[some.length - 1]}`);

  // The colour of a share of the scale, from 0 to 1.
  const colouring = () => {
    const stops = [0, 1, 2, 3, 4].map((stop) => rgb(style(`--heat-${stop}`)));
    return (share) => {
      const place = Math.min(Math.max(share, 0), 1) * 4;
      const stop = Math.min(Math.floor(place), 3);
      return stops[stop].map((part, at) => Math.round(part + (stops[stop + 1][at] - part) * (place - stop)));
    };
  };

  // What a level, of 1 to 255 between `least` and `most`, stands for.
  const valueOf = (one, level) => one.least * (one.most / one.least) ** ((level - 1) / 254);

  // The colours of all levels, of which 0 is none, where the scale goes from `low` to `high`.
  const palette = (one, low, high) => {
    const colour = colouring();
    const colours = new Uint8ClampedArray(256 * 4);
    colours.set([...rgb(style("--heat-none")), 255], 0);
    for (let level = 1; level < 256; level += 1) {
      const share = high > low ? Math.log(valueOf(one, level) / low) / Math.log(high / low) : 0;
      colours.set([...colour(share), 255], level * 4);
    }
    return colours;
  };

  const paint = (levels, columns, rows, colours) => {
    const canvas = document.createElement("canvas");
    canvas.width = columns;
    canvas.height = rows;
    const image = new ImageData(columns, rows);
    levels.forEach((level, at) => image.data.set(colours.subarray(level * 4, level * 4 + 4), at * 4));
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  };

  const ticks = (many, room) => {
    const step = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].find((one) => many / one <= room) || 1024;
    return Array.from({ length: Math.ceil(many / step) }, (_, at) => at * step);
  };

  // One picture: what it looks like, and what is said where one points at it.
  class Picture {
    constructor(place, data) {
      this.place = place;
      this.data = data;
      this.canvas = place.querySelector("canvas");
      this.tip = document.createElement("div");
      this.tip.className = "tip";
      this.tip.hidden = true;
      place.append(this.tip);
      this.canvas.addEventListener("pointermove", (event) => this.point(event));
      this.canvas.addEventListener("pointerdown", (event) => this.point(event));
      this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      dark.addEventListener("change", () => this.draw());
      new ResizeObserver(() => { if (place.clientWidth !== this.drawn) this.draw(); }).observe(place);
    }

    frame(box, height) {
      const sharp = devicePixelRatio || 1;
      this.drawn = this.place.clientWidth;
      this.box = box;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(this.drawn * sharp);
      this.canvas.height = Math.round(height * sharp);
      const pen = this.canvas.getContext("2d");
      pen.setTransform(sharp, 0, 0, sharp, 0, 0);
      pen.imageSmoothingEnabled = false;
      pen.font = "12px system-ui, sans-serif";
      pen.fillStyle = style("--soft");
      return pen;
    }

    // The scale of colours, from `from` to `to`, in the bottom line.
    scale(pen, top, from, to, none) {
      const left = this.box.left;
      const colour = colouring();
      pen.fillStyle = style("--soft");
      pen.textBaseline = "middle";
      pen.textAlign = "left";
      pen.fillText(from, left, top + 6);
      const begin = left + pen.measureText(from).width + 6;
      const wide = Math.min(100, Math.round(this.box.width / 5));
      for (let at = 0; at < wide; at += 1) {
        pen.fillStyle = `rgb(${colour(at / (wide - 1))})`;
        pen.fillRect(begin + at, top, 1.5, 12);
      }
      pen.fillStyle = style("--soft");
      pen.fillText(to, begin + wide + 6, top + 6);
      const next = begin + wide + 6 + pen.measureText(to).width + 16;
      pen.fillStyle = style("--heat-none");
      pen.fillRect(next, top, 12, 12);
      pen.fillStyle = style("--soft");
      pen.fillText(none, next + 16, top + 6);
    }

    point(event) {
      const { left, top, width, height } = this.box;
      const across = (event.offsetX - left) / width;
      const down = (event.offsetY - top) / height;
      if (!(across >= 0 && across < 1 && down >= 0 && down < 1)) { this.tip.hidden = true; return; }
      this.tip.textContent = this.said(across, down);
      this.tip.hidden = false;
      const room = this.place.clientWidth - this.tip.offsetWidth;
      this.tip.style.left = `${Math.max(Math.min(event.offsetX + 12, room), 0)}px`;
      this.tip.style.top = `${event.offsetY + 16}px`;
    }
  }

  class Heat extends Picture {
    constructor(place, data) {
      super(place, data);
      this.layers = data.layers.map((layer) => ({ ...layer, levels: unpack(layer.levels) }));
      this.chosen = 0;
      place.parentElement.querySelectorAll(".choice input").forEach((input, at) => {
        if (input.checked) this.chosen = at;
        input.addEventListener("change", () => { this.chosen = at; this.draw(); });
      });
      this.draw();
    }

    draw() {
      const { data } = this;
      const layer = this.layers[this.chosen];
      const rows = data.rows.length;
      // What differs by less than that is alike, and looks so.
      const high = Math.max(layer.high, layer.low * 1.5);
      const colours = palette(layer, layer.low, high);
      const tall = Math.min(Math.max(Math.floor(420 / rows), 1), 28) * rows;
      const left = 10 + 7 * String(data.rows[rows - 1][0]).length;
      const pen = this.frame({ left, top: 2, width: this.place.clientWidth - left, height: tall }, tall + 46);
      pen.drawImage(paint(layer.levels, data.columns, rows, colours), left, 2, this.box.width, tall);
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      const row = tall / rows;
      const height = (at) => 2 + Math.min(Math.max((at + 0.5) * row, 6), tall - 6);
      ticks(rows, tall / 20).forEach((at) => {
        pen.fillText(String(data.rows[at][0]), left - 6, height(at));
      });
      const end = data.start + data.columns * data.width;
      const spread = Math.max(Math.floor(this.box.width / 150), 1);
      pen.textBaseline = "top";
      for (let at = 0; at <= spread; at += 1) {
        pen.textAlign = at === 0 ? "left" : at === spread ? "right" : "center";
        const moment = data.start + ((end - data.start) * at) / spread;
        pen.fillText(clock(moment, end - data.start < 10000), left + (this.box.width * at) / spread, tall + 6);
      }
      this.scale(pen, tall + 28, time(layer.low), `${time(high)} and more`, "no step");
    }

    said(across, down) {
      const { data } = this;
      const layer = this.layers[this.chosen];
      const column = Math.floor(across * data.columns);
      const row = Math.floor(down * data.rows.length);
      const level = layer.levels[row * data.columns + column];
      const began = data.start + column * data.width;
      const fine = data.width < 2000;
      const where = data.hosts[row] ? ` · ${data.hosts[row]}` : "";
      const when = `${clock(began, fine)} + ${time(data.width)}`;
      return `${ranks(data.rows[row])}${where} · ${when} · ${level ? `${layer.name.toLowerCase()} ≈ ${time(valueOf(layer, level))}` : "no step"}`;
    }
  }

  class Matrix extends Picture {
    constructor(place, data) {
      super(place, data);
      this.levels = unpack(data.levels);
      this.draw();
    }

    draw() {
      const { data } = this;
      const many = data.blocks.length;
      const left = 10 + 7 * String(data.blocks[many - 1][0]).length;
      const side = Math.min(this.place.clientWidth - left, Math.max(many * 6, Math.min(many * 40, 420)));
      const colours = palette(data, data.least, data.most);
      const pen = this.frame({ left, top: 20, width: side, height: side }, side + 46);
      pen.drawImage(paint(this.levels, many, many, colours), left, 20, side, side);
      ticks(many, side / 26).forEach((at) => {
        const middle = ((at + 0.5) * side) / many;
        pen.textBaseline = "middle";
        pen.textAlign = "right";
        pen.fillText(String(data.blocks[at][0]), left - 6, 20 + middle);
        pen.textAlign = "center";
        pen.textBaseline = "bottom";
        pen.fillText(String(data.blocks[at][0]), left + middle, 18);
      });
      this.scale(pen, side + 28, bytes(data.least), bytes(data.most), "nothing");
    }

    said(across, down) {
      const { data } = this;
      const many = data.blocks.length;
      const from = Math.floor(down * many);
      const to = Math.floor(across * many);
      const level = this.levels[from * many + to];
      return `${ranks(data.blocks[from])} → ${ranks(data.blocks[to])}: ${level ? `≈ ${bytes(valueOf(data, level))}` : "nothing"}`;
    }
  }

  const kinds = { heat: Heat, matrix: Matrix };
  document.querySelectorAll(".picture").forEach((place) => {
    const data = pictures[place.id];
    new kinds[data.kind](place, data);
  });
})();

"use strict";
/* One item, a picture or a recording, at a time: a key or a tap labels, skips or discards it, and the answer brings the next one. No key hits
   something else than was seen: the item on the screen, its preselected class and the keys of the classes stay as they are while a new head is
   fitted; nothing can be done to an item before it has been on the screen for SEEN_MS, less than a person takes to recognise one; nothing is
   queued. */

const POLL_MS = 2000, BUSY_MS = 400, SEEN_MS = 250, LOAD_MS = 15000, MOST_FILES = 8;
const $ = (id) => document.getElementById(id);
const client = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
const done = [], images = new Map();
let view = null, shown = null, selected = "", waiting = false, timer = 0;
let state = "loading";  // of the item `shown`: "loading", "failed" or "seen"
let pressed = null, isKeyDown = false;  // what was on the screen when the last key or button went down
let turn = 0;  // counts actions: an answer to a look from before an action is out of date

async function request(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { ...options, headers: { "X-Edge-FL": "label" }, cache: "no-store" });
  const content = await response.json();
  if (!response.ok) throw Object.assign(new Error(content.error), { isRefused: true });
  return content;
}

async function enter() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  const headers = { "X-Edge-FL": "label", Authorization: "Bearer " + token };
  const response = await fetch("/api/label/enter", { method: "POST", body: "", headers });
  if (!response.ok) throw new Error((await response.json()).error);
}

const address = (item, what = "preview") => "/api/label/" + what + "?name=" + encodeURIComponent(item.name) + "&version=" + item.version;
const capital = (words) => words[0].toUpperCase() + words.slice(1);
const percent = (share) => Math.round(100 * share) + " %";
const isSame = (one, other) => Boolean(one && other) && one.name === other.name && one.version === other.version;

function adopt(fresh) {
  const before = view ? view.classes : [];
  view = fresh;
  arrange(before, isSame(view.item, shown));
  if (!isSame(view.item, shown)) {
    shown = view.item;
    selected = "";
    state = "loading";
    $("picture").hidden = true;
    cue(null);
    if (shown) bring(shown);
  } else if (shown && state === "failed") {
    bring(shown);
  } else if (shown && !shown.guesses.length && view.item.guesses.length) {
    shown.guesses = view.item.guesses;
    if (!selected && !$("picture").hidden) preselect();
  }
  const kept = new Set([shown, ...view.upcoming].filter(Boolean).map((item) => address(item)));
  for (const name of images.keys()) if (!kept.has(name)) images.delete(name);
  view.upcoming.forEach(load);
  draw();
}

/* Classes keep their places, and so their keys; new ones follow, and none goes while an item is on the screen. */
function arrange(before, keepAll) {
  const found = new Map(view.classes.map((each) => [each.name, each]));
  const old = before.map((each) => found.get(each.name) || (keepAll && each)).filter(Boolean);
  const names = new Set(before.map((each) => each.name));
  view.classes = [...old, ...view.classes.filter((each) => !names.has(each.name))];
}

/* The picture of an item, which loads once. */
function load(item) {
  const name = address(item);
  if (!images.has(name)) images.set(name, Object.assign(new Image(), { id: "picture", src: name }));
  return images.get(name);
}

/* Readies the sound of an item. It is fetched as a whole: Safari plays no address without ranges of bytes. */
async function cue(item) {
  const sound = $("sound");
  URL.revokeObjectURL(sound.src);
  sound.removeAttribute("src");
  sound.hidden = view.kind !== "audio" || !item;
  if (sound.hidden) return;
  const response = await fetch(address(item, "sound"), { cache: "no-store" }).catch(() => null);
  if (response && response.ok && shown === item) sound.src = URL.createObjectURL(await response.blob());
}

/* Puts an item on the screen once its picture is decoded. One that cannot be loaded is tried again with every look at the device. */
async function bring(item) {
  if (item.isPending) return;
  item.isPending = true;
  const image = load(item), isFirst = state === "loading";
  const isLate = new Promise((_, reject) => setTimeout(reject, LOAD_MS));
  try {
    await Promise.race([image.decode(), isLate]);
  } catch {
    if (image.complete) images.delete(address(item));
    if (shown !== item) return;
    state = "failed";
    draw();
    if (isFirst) poll();
    return;
  } finally {
    item.isPending = false;
  }
  if (shown !== item) return;
  state = "loading";
  image.hidden = false;
  image.alt = capital(view.word) + " to label" + (item.about && ": " + item.about);
  $("picture").replaceWith(image);
  cue(item);
  preselect();
  draw();
  setTimeout(() => {
    if (shown !== item) return;
    state = "seen";
    draw();
  }, SEEN_MS);
}

function preselect() {
  const best = shown && shown.guesses[0];
  selected = best && view.classes.some((each) => each.name === best.label) ? best.label : "";
}

function draw() {
  const labelled = view.classes.reduce((sum, each) => sum + each.count, 0);
  $("accuracy").textContent = view.accuracy === null ? "–" : percent(view.accuracy);
  $("accuracy").title = view.accuracy_words;
  $("measured").textContent = [view.accuracy_words && "Accuracy: " + view.accuracy_words, view.forecast && "Forecast: " + view.forecast, view.first_guesses].filter(Boolean).join("; ");
  $("contradiction").hidden = !view.contradiction;
  $("contradiction").textContent = view.contradiction;
  $("labelled").textContent = labelled;
  $("unlabelled").textContent = view.unlabelled;
  const isVisible = !$("picture").hidden, isSeen = Boolean(shown) && state === "seen";
  $("empty").hidden = isVisible;
  $("empty").textContent = isVisible ? "" : absent();
  const guess = isVisible && shown.guesses.find((each) => each.label === selected);
  $("remarks").textContent = isVisible ? shown.remarks.join("; ") : "";
  $("caption").textContent = !isVisible ? "" : [
    shown.guesses.map((each) => each.label + " " + percent(each.probability)).join(" · ") || "no prediction yet",
    shown.about + (view.kind === "audio" ? ", P plays" : ""),
    shown.time ? new Date(1000 * shown.time).toLocaleString() : "",
  ].filter(Boolean).join("  –  ");
  $("accept").firstChild.textContent = accepted(isVisible, guess);
  const idle = isSeen && !waiting;
  $("accept").disabled = !idle || !selected;
  $("discard").disabled = !idle;
  $("skip").disabled = !idle && (waiting || !shown || state !== "failed");
  $("undo").disabled = waiting || !done.length || (Boolean(shown) && state === "loading");
  $("add").disabled = false;  // as all buttons, until the first view
  drawClasses();
  drawSuggestion();
  const outside = view.classes.filter((each) => !each.learned);
  $("rule").hidden = !outside.length;
  $("rule").textContent = outside.length
    ? "Dashed: no class of release " + view.release + ". Its " + view.word + "s stay in the folder of this name and are learned once a release names the class."
    : "";
  drawDoubts();
  $("status").textContent = status();
  $("status").classList.toggle("problem", Boolean(view.problem));
}

function absent() {
  if (shown && state === "failed") {
    return "This " + view.word + " cannot be shown: " + [shown.name, ...shown.remarks].join(", ") + ". The page tries again; Skip goes on to the next one.";
  }
  if (shown) return "Loading the " + view.word + " ...";
  if (view.kind === "table") return "This device learns from rows of tables. They are labelled in their files, not on this page.";
  return view.unlabelled
    ? "The other " + view.word + "s are on the screens of other people."
    : "No " + view.word + " to label. New ones come from " + (view.kind === "picture" ? "a camera, " : "") + "a watched folder, or POST /frame.";
}

function accepted(isVisible, guess) {
  if (!view.classes.length) return "Add a class first";
  if (!isVisible) return "No " + view.word + (shown ? " yet" : "");
  if (!selected) return "Select a class";
  return (guess && guess === shown.guesses[0] ? "Accept " : "Label as ") + selected + (guess ? " (" + percent(guess.probability) + ")" : "");
}

/* Buttons are changed in place: one that is replaced between press and release gets no click. */
function drawClasses() {
  const box = $("classes");
  while (box.children.length > view.classes.length) box.lastChild.remove();
  while (box.children.length < view.classes.length) {
    const element = document.createElement("button"), number = box.children.length;
    element.append(document.createElement("kbd"), document.createElement("span"), document.createElement("small"));
    element.children[0].textContent = number < 9 ? number + 1 : "0";
    element.children[0].hidden = number > 9;
    element.onclick = click(() => label(view.classes[number].name));
    box.append(element);
  }
  view.classes.forEach((each, number) => {
    const element = box.children[number];
    element.children[1].textContent = each.name;
    element.children[2].textContent = each.count;
    element.classList.toggle("waits", !each.learned);
    element.setAttribute("aria-pressed", String(each.name === selected));
    element.disabled = !shown || state !== "seen" || waiting;
  });
}

/* Drawn anew only for another suggestion, so that a name is not lost while it is typed. */
function drawSuggestion() {
  const box = $("suggestion"), found = view.suggestion, id = found ? found.id : "";
  for (const button of box.querySelectorAll("button")) button.disabled = waiting;
  if (box.dataset.id === id) return;
  box.dataset.id = id;
  box.hidden = !found;
  $("suggested").value = "";
  $("resemble").textContent = found ? found.files.length + " " + view.word + "s resemble each other and none of your classes: which class are they?" : "";
  $("files").replaceChildren(...(found ? found.files.slice(0, MOST_FILES) : []).map((item) =>
    Object.assign(new Image(), { src: address(item), alt: capital(view.word) + " " + item.name, title: item.name })));
}

function status() {
  if (view.problem) return "Not learned yet: " + view.problem;
  if (view.waiting) return "Learning from " + view.waiting + " more labelled " + view.word + "s ...";
  if (!view.release) return "No release yet: labels are stored, and learned when the first one arrives.";
  if (!view.head) return "Two labelled " + view.word + "s, and predictions begin.";
  const state = view.busy ? ", learning ..." : view.remark ? "; " + view.remark : "";
  return "Release " + view.release + ", " + (view.head_words === view.head ? view.head + " head" : view.head_words) + state;
}

function say(text, problem = false) {
  $("message").textContent = text;
  $("message").classList.toggle("problem", problem);
}

async function act(work) {
  if (waiting) return;
  waiting = true;
  turn += 1;
  draw();
  try {
    await work();
  } catch (error) {
    await refresh().catch(() => {});
    say(error.message, true);
  }
  waiting = false;
  draw();
  plan();
}

/* The item is that of the moment of the key or click. */
const perform = (path, body, text) => act(async () => {
  const { name, version } = shown, answer = await request(path, { client, name, version, ...body });
  done.push([answer.action, text]);
  say(text);
  adopt(answer.view);
});

const label = (name) => perform("/api/label/label", { class_name: name }, "Labelled: " + name);
const skip = () => perform("/api/label/skip", {}, "Skipped");
const discard = () => perform("/api/label/discard", {}, "Discarded");

const undo = () => act(async () => {
  const [action, text] = done[done.length - 1];
  let fresh;
  try {
    fresh = await request("/api/label/undo", { client, action });
  } catch (error) {
    if (error.isRefused) done.pop();
    throw error;
  }
  done.pop();
  say("Undone: " + text);
  adopt(fresh);
});

const addClass = (name) => act(async () => {
  const added = await request("/api/label/class", { client, name });
  say("New class: " + added.name + (added.remark ? " (" + added.remark + ")" : ""));
  close();
  adopt(added.view);
});

const labelSuggestion = (name) => act(async () => {
  const { id, files } = view.suggestion, answer = await request("/api/label/suggestion", { client, suggestion: id, class_name: name });
  const text = "Labelled: " + files.length + " " + view.word + "s " + name;
  done.push([answer.action, text]);
  say(text);
  $("suggested").blur();
  adopt(answer.view);
});

const dismissSuggestion = () => act(async () => {
  const fresh = await request("/api/label/dismiss", { client, suggestion: view.suggestion.id });
  say("Not suggested again");
  adopt(fresh);
});

/* A click counts for the item on which its button went down, and a double click once. Screen readers click without pressing. */
function click(work) {
  return (event) => {
    if ((event.detail > 0 || isKeyDown) && pressed !== shown) return;
    if (event.detail > 1 && event.pointerType === "mouse") return say("The second click of a double click was ignored.");
    work();
  };
}

function open() {
  $("new").hidden = false;
  $("name").value = "";
  $("name").focus();
}

function close() {
  $("new").hidden = true;
  $("name").blur();
}

async function refresh() {
  const before = turn, fresh = await request("/api/label/view?client=" + client);
  if (turn === before) adopt(fresh);
}

function plan() {
  clearTimeout(timer);
  timer = setTimeout(poll, view && view.busy ? BUSY_MS : POLL_MS);
}

async function poll() {
  if (!waiting && !document.hidden) {
    try {
      await refresh();
    } catch (error) {
      say(error.message || "the device does not answer", true);
    }
  }
  plan();
}

$("accept").onclick = click(() => label(selected));
$("skip").onclick = click(skip);
$("discard").onclick = click(discard);
$("undo").onclick = click(undo);
$("add").onclick = open;
$("cancel").onclick = close;
$("new").onsubmit = (event) => {
  event.preventDefault();
  if ($("name").value.trim()) addClass($("name").value.trim());
};

$("dismiss").onclick = dismissSuggestion;
$("suggestion").onsubmit = (event) => {
  event.preventDefault();
  if ($("suggested").value.trim()) labelSuggestion($("suggested").value.trim());
};

const press = () => { pressed = state === "loading" ? null : shown; };
document.addEventListener("pointerdown", press, true);
document.addEventListener("keydown", (event) => {
  if (!event.repeat) press();
  isKeyDown = true;
}, true);
document.addEventListener("keyup", () => setTimeout(() => { isKeyDown = false; }), true);
window.addEventListener("blur", () => { isKeyDown = false; });

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.repeat) return event.preventDefault();  // it would press a focused button again and again
  if (event.key === "Escape") return close();
  if (!$("new").hidden || event.target === $("suggested") || event.ctrlKey || event.metaKey || event.altKey || !view) return;
  const buttons = { s: "skip", d: "discard", u: "undo", n: "add", l: "examine" };
  if (event.key.toLowerCase() === "p" && $("sound").src) {
    $("sound")[$("sound").paused ? "play" : "pause"]();
  } else if (event.key === "Enter" && event.target.tagName !== "BUTTON") {
    pressOnce(event, $("accept"));
  } else if (/^[0-9]$/.test(event.key)) {
    pressOnce(event, $("classes").children[(Number(event.key) + 9) % 10]);
  } else if (event.key.startsWith("Arrow") && view.classes.length) {
    const step = event.key === "ArrowDown" || event.key === "ArrowRight" ? 1 : -1, count = view.classes.length;
    const at = view.classes.findIndex((each) => each.name === selected);
    if (!$("picture").hidden) selected = view.classes[at < 0 ? 0 : (at + step + count) % count].name;
    draw();
  } else if (buttons[event.key.toLowerCase()]) {
    pressOnce(event, $(buttons[event.key.toLowerCase()]));
  } else if (doubtButton(event.key)) {
    pressOnce(event, doubtButton(event.key));
  } else return;
  event.preventDefault();
});

/* A key does what its button does, if it can be pressed; a key that is held down does it once. */
function pressOnce(event, button) {
  if (button && !event.repeat && !button.disabled) button.click();
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

enter().then(refresh).then(plan).catch((error) => say(error.message, true));

// Frames of a run, recorded or still growing, played at any speed, forwards and back, step by step.

export class Playback {
  // answers: by key, those that the frames' events are of; shows: called with each frame reached.
  // A frame: t (milliseconds); key, step and events of an answer; state, runs … of a picture.
  constructor(answers, shows) {
    this.answers = answers;
    this.shows = shows;
    this.frames = [];
    this.at = -1;
    this.clock = 0;
    this.timer = null;
    this.speed = 1;
    this.growing = true;
  }

  get playing() {
    return this.timer !== null;
  }

  get last() {
    return this.frames.length - 1;
  }

  // Frames are differences: going back begins at the beginning.
  go(to) {
    const target = Math.min(Math.max(to, 0), this.last);
    if (target < this.at) {
      for (const answer of this.answers.values()) answer.clear();
      this.at = -1;
    }
    const changed = new Map();  // answers, and when
    let picture = null;
    while (this.at < target) {
      const frame = this.frames[++this.at];
      for (const [key, ...event] of frame.events ?? []) {
        const answer = this.answers.get(key);
        answer?.take([event], frame.step ?? this.at, frame.t);
        if (answer) changed.set(answer, frame.t);
      }
      if (frame.runs) picture = frame;
    }
    for (const [answer, millis] of changed) answer.show(millis);
    this.shows(this, picture);
  }

  jump(to) {
    this.pause();
    this.go(to);
    this.clock = this.frames[this.at]?.t ?? 0;
  }

  play() {
    if (this.at === this.last && !this.growing) this.jump(0);
    let before = performance.now();
    const tick = (now) => {
      this.clock += Math.max(now - before, 0) * this.speed;
      before = now;
      let next = this.at;
      while (next < this.last && this.frames[next + 1].t <= this.clock) next += 1;
      const ends = next === this.last && !this.growing;
      if (this.growing) this.clock = Math.min(this.clock, now - this.began);
      this.timer = ends ? null : requestAnimationFrame(tick);
      if (next !== this.at || ends) this.go(next);
    };
    this.timer = requestAnimationFrame(tick);
    this.shows(this, null);
  }

  pause() {
    cancelAnimationFrame(this.timer);
    this.timer = null;
    this.shows(this, null);
  }
}

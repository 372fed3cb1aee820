// How the page asks its server: JSON, and streams of events over fetch, with the key if there is one.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Server {
  constructor(key) {
    this.key = key;
  }

  async ask(path, body, signal) {
    const headers = {};
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    const options = { headers, signal };
    if (body !== undefined) {
      headers["Content-Type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    const response = await fetch(path, options);
    if (!response.ok) {
      const told = await response.json().catch(() => null);
      throw new Refused(response.status, told?.error?.message ?? `status ${response.status}`);
    }
    return response;
  }

  async json(path) {
    return (await this.ask(path)).json();
  }

  // The data of each event of a stream, parsed; ends at [DONE].
  async *events(path, body, signal) {
    const response = await this.ask(path, body, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice(6).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  }
}

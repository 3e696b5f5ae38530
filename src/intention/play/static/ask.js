// Questions to the server. While one is on its way only the latest of those that follow is kept.

export async function post(path, state) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(state),
  });
  const found = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(found.error ?? `the server answered ${response.status}`);
  return found;
}

export class Asker {
  constructor(path, heard, failed) {
    Object.assign(this, { path, heard, failed, next: null, busy: false, closed: false });
  }

  ask(state) {
    this.next = { state: structuredClone(state), since: performance.now() };
    if (!this.busy) this.run();
  }

  async run() {
    this.busy = true;
    while (this.next && !this.closed) {
      const { state, since } = this.next;
      this.next = null;
      try {
        const answer = await post(this.path, state);
        if (!this.closed) this.heard(answer, state, since);
      } catch (error) {
        if (!this.closed) this.failed(error.message.includes("fetch") ? "The server does not answer. Is it still running?" : error.message);
      }
    }
    this.busy = false;
  }

  close() { this.closed = true; }
}

"""JupyterLab or Voila on loopback and a headless chromium in front of it: what browser tests of notebooks are made of."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Page, Route, sync_playwright

ROOT = Path(__file__).parents[2]
INSTALL = (
    "no chromium found. Debian: apt-get install -y --no-install-recommends chromium fonts-dejavu-core; "
    "elsewhere: .venv/bin/playwright install chromium; or set CHROMIUM to the program of a Chrome or Chromium"
)
SETTINGS = {
    # Else a pop-up asks whether to fetch news, and lies over the page.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    # Every cell is in the page, not only those in view.
    "notebook-extension/tracker": {"windowingMode": "none"},
}
NOTEBOOK = "window.jupyterapp.shell.currentWidget"
KERNEL = f"{NOTEBOOK}.sessionContext.session.kernel"
CODE = f"{NOTEBOOK}.content.widgets.filter(c => c.model.type === 'code' && c.model.sharedModel.getSource().trim())"
ERRORS = f"{CODE}.flatMap(c => c.model.outputs.toJSON().filter(o => o.output_type === 'error'))"


def chromium() -> str | None:
    """The path of a chromium: `CHROMIUM`, one on the path, or the one that playwright installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        with sync_playwright() as playwright:
            found = playwright.chromium.executable_path
    return found if Path(found).exists() else None


@contextmanager
def lab(folder: Path, scratch: Path) -> Iterator[str]:
    """Serve `folder`; gives the address, `{}` in it standing for a notebook's path. Settings and log go to `scratch`."""
    for name, content in SETTINGS.items():
        file = scratch / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    port, token = free_port(), secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={folder}"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True"]
    with serving(command, f"http://127.0.0.1:{port}/api?token={token}", scratch):
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?reset&token={token}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextmanager
def serving(command: list[str], address: str, scratch: Path) -> Iterator[None]:
    """Run a server, in a process group of its own, that answers at `address`; what it keeps in a home goes to `scratch`."""
    places = {
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTER_CONFIG_DIR": "config",
        "IPYTHONDIR": "ipython",
    }
    environment = {**os.environ, **{name: str(scratch / place) for name, place in places.items()}}
    environment.pop("PLOTLY_RENDERER", None)  # a reader has none
    log = scratch / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        _wait_for(address, server, log)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 60) -> None:
    last = time.monotonic() + seconds
    while time.monotonic() < last and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except urllib.error.HTTPError:  # an answer
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"nothing answered within {seconds:.0f} s:\n{log.read_text()}")


@dataclass
class Tab:
    """A browser tab on a server, and what it noted: requests that would have left the machine, errors on the console."""

    page: Page
    address: str
    outside: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.route("**/*", self._guard)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.console.append(f"uncaught: {error}"))

    @property
    def origin(self) -> str:
        return "{0.scheme}://{0.netloc}".format(urlsplit(self.address))

    def _guard(self, route: Route) -> None:
        if route.request.url.startswith((self.origin + "/", "data:", "blob:")):
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.console.append(message.text)

    def open(self, notebook: str) -> None:
        """Show a notebook, by its path in the served folder, and wait for its kernel."""
        self.page.goto(self.address.format(notebook))
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.wait_for_function(
            f"() => {{ const c = {NOTEBOOK}?.sessionContext; return c?.isReady && c.kernelDisplayStatus === 'idle'"
            " && c.session?.kernel?.connectionStatus === 'connected' }"
        )

    def clear(self) -> None:
        """Drop what cells have stored."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
        self.page.wait_for_function(f"() => {CODE}.every(c => c.model.executionCount === null)")

    def run_all(self, seconds: float = 300) -> None:
        """Run all cells, from no stored output; returns when the last has run or one has raised."""
        self.clear()
        # Not awaited: the promise of run-all-cells may stay open.
        self.page.evaluate("() => { void window.jupyterapp.commands.execute('notebook:run-all-cells') }")
        self.page.wait_for_function(
            f"() => {NOTEBOOK}.sessionContext.kernelDisplayStatus === 'idle'"
            f" && ({CODE}.every(c => c.model.executionCount) || {ERRORS}.length)",
            timeout=seconds * 1000,
        )

    def run_cell(self, index: int) -> None:
        """Run the code cell of this index among code cells, again if need be; returns when it has run."""
        cell = f"{CODE}[{index}]"
        before = self.page.evaluate(f"() => {cell}.model.executionCount ?? 0")
        self.page.evaluate(f"() => {{ {NOTEBOOK}.content.activeCellIndex = {NOTEBOOK}.content.widgets.indexOf({cell}) }}")
        self.page.evaluate("() => { void window.jupyterapp.commands.execute('notebook:run-cell') }")
        self.page.wait_for_function(f"() => {cell}.model.executionCount > {before}")

    def start(self, code: str) -> None:
        """Have the kernel run code, as a cell would; returns at once."""
        self.page.evaluate(f"code => {{ void {KERNEL}.requestExecute({{ code, silent: false, store_history: false }}) }}", code)

    def value(self, expression: str) -> str:
        """What a Python expression gives in the kernel, as its repr."""
        found: str = self.page.evaluate(
            f"""async expression => {{
                const asked = {{ code: '', silent: true, user_expressions: {{ it: expression }} }};
                const it = (await {KERNEL}.requestExecute(asked).done).content.user_expressions.it;
                return it.data ? it.data['text/plain'] : it.ename + ': ' + it.evalue;
            }}""",
            expression,
        )
        return found

    def in_subshell(self, expression: str) -> str:
        """As `value`, in a subshell of the kernel: on another thread, also while a cell runs."""
        self.page.evaluate(
            f"""async () => {{
                window.subshell ??= (await {KERNEL}.requestCreateSubshell({{}}).done).content.subshell_id;
                {KERNEL}.subshellId = window.subshell;
            }}"""
        )
        try:
            return self.value(expression)
        finally:
            self.page.evaluate(f"() => {{ {KERNEL}.subshellId = null }}")

    def raised(self) -> list[str]:
        """The errors that cells show, as `name: text`."""
        errors: list[dict[str, Any]] = self.page.evaluate(f"() => {ERRORS}")
        return [f"{error['ename']}: {error['evalue']}" for error in errors]

    def figure_titles(self) -> list[str]:
        """The titles that plotly has drawn on this page, "" for a figure without."""
        plots = self.page.locator(".js-plotly-plot:has(.main-svg)")
        plots.first.wait_for()
        return [plot.locator(".gtitle").first.text_content() or "" if plot.locator(".gtitle").count() else "" for plot in plots.all()]


@contextmanager
def tab(address: str, program: str) -> Iterator[Tab]:
    """Start a headless chromium, `program`, with one tab for the server at `address`."""
    with sync_playwright() as playwright:
        # A container's root has no sandbox for it; the pages shown are our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1500})
        page.set_default_timeout(60_000)
        try:
            yield Tab(page, address)
        finally:
            browser.close()

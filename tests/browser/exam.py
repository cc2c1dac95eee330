"""Pictures of a fleet's page in eight situations, at 8 and at 512 ranks, for readers who shall say what is wrong:
python tests/browser/exam.py SEED FOLDER [NUMBER...] (some of them alone). What each shows is in FOLDER.key, beside the
folder; the names of the pictures tell nothing.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

from fleet_pages import ROOT, PageServer
from fleet_sim import SITUATIONS
from playwright.sync_api import sync_playwright

SIZES = (8, 512)
WIDTH, HEIGHT = 1440, 1000


def main(seed: str, folder: str, *only: str) -> None:
    """Draw an order and the ranks by `seed`, and take two pictures of each: the top, and what is below."""
    rng, to = random.Random(seed), Path(folder)
    known = to.with_suffix(".key")
    key = dict(line.split("\t", 1) for line in (known.read_text().splitlines() if only else ()))
    to.mkdir(parents=True, exist_ok=True)
    cases = list(itertools.product(SITUATIONS, SIZES))
    rng.shuffle(cases)
    with sync_playwright() as playwright:
        chromium = shutil.which(os.environ.get("CHROMIUM", "chromium"))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--disable-gpu"])
        numbered = [(number, *case, str(rng.randrange(10**6))) for number, case in enumerate(cases, 1)]
        for number, situation, ranks, of_seed in sorted(numbered, key=lambda each: each[2]):
            if only and str(number) not in only:
                continue
            server = PageServer(str(ROOT / "tests/support/fleet_sim.py"), situation, str(ranks), of_seed)
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.set_default_timeout(300_000)  # of a busy machine
            page.goto(server.url)
            page.wait_for_selector("#listed, #no-requests:not([hidden])")
            page.wait_for_function("document.querySelector('#clock').textContent")
            page.screenshot(path=to / f"{number:02}-a.png")
            page.evaluate("scrollBy(0, innerHeight)")
            page.screenshot(path=to / f"{number:02}-b.png")
            said = page.locator("#verdict").inner_text().replace("\n", " | ")
            key[f"{number:02}"] = f"{situation}\t{ranks} ranks\t{said}"
            print(number, key[f"{number:02}"], flush=True)
            page.close()
            server.close()
        browser.close()
    known.write_text("".join(f"{number}\t{what}\n" for number, what in sorted(key.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])

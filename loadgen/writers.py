"""Where a run gets its prompts' tokens from: the model's folder, or an engine that serves the model."""

from __future__ import annotations

from kvcache.tokenizer import Tokenizer
from loadgen.prompts import PromptWriter
from loadgen.run_config import RunConfig, RunConfigError
from loadgen.scenario import Scenario
from loadgen.secret_headers import bearer, filled_in
from loadgen.served_tokenizer import ServedTokenizer


def writer_for(config: RunConfig, scenario: Scenario) -> PromptWriter:
    """Raises TokenizerError, PromptError, SecretError, or RunConfigError for traffic that only the folder can count."""
    if config.model_dir is not None:
        return PromptWriter(Tokenizer(config.model_dir))
    answers = scenario.replay.answers if scenario.replay is not None else scenario.sessions.answers
    if answers == "generated":
        raise RunConfigError(
            "answers: generated needs model_dir (--model-dir): turns that carry generated answers are counted while "
            "the run goes on, when nobody else may be asked"
        )
    if config.tokenize_url:  # another server than the target: its key stays at home
        return PromptWriter(ServedTokenizer(config.tokenize_url, config.model))
    headers = filled_in({**config.headers, **bearer(config.api_key_env)})
    return PromptWriter(ServedTokenizer(config.target, config.model, headers=headers))

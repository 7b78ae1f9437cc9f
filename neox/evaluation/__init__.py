"""Scores of a model: perplexities, LAMBADA and the tasks of lm-evaluation-harness.

    eval_tasks     lambada=FILE, wikitext=FILE, perplexity=FILE, needle=PICTURE, names of the harness
        |          tasks.py: names and files, checked without torch
        v
    evaluate.py    each task in turn, with a loaded model or one in training
        |          lambada.py, perplexity.py, needle.py, harness.py: texts -> spans of tokens
        v
    scoring.py     log-probabilities of spans, divided among the data-parallel ranks
        v
    results.py     `TaskResult`: metrics and counts; tables and files

`text_probabilities.py` scores the lines of a file with a language model, `text_scores.py` answers with a reward model.
`squad.py` has SQuAD's official scores, `task_texts.py` the texts of tasks for decontamination. Import the modules.
"""

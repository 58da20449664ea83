"""Ready pieces for the frameworks that users already have, one module each.

| module | for | extra |
|---|---|---|
| `lightning` | Lightning | `fcco[lightning]` |
| `accelerate` | Accelerate | `fcco[accelerate]` |
| `transformers` | the Trainer of Hugging Face | `fcco[transformers]` |
| `sentence_transformers` | sentence-transformers | `fcco[sentence-transformers]` |
| `open_clip` | training loops of open_clip | none |
| `sklearn` | scikit-learn: estimators with `fit` and `predict_proba` | `fcco[sklearn]` |

Nothing here is imported by `import fcco`: import the module you need, as in
`from fcco.integrations.lightning import ...`.
"""

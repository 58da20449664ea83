"""Ready pieces for the frameworks that users already have, one module each.

| module | for | extra |
|---|---|---|
| `fcco.integrations.lightning` | Lightning | `fcco[lightning]` |
| `fcco.integrations.accelerate` | Accelerate | `fcco[accelerate]` |
| `fcco.integrations.transformers` | the Trainer of Hugging Face | `fcco[transformers]` |
| `fcco.integrations.sentence_transformers` | sentence-transformers | `fcco[sentence-transformers]` |
| `fcco.integrations.open_clip` | training loops of open_clip | none |
| `fcco.integrations.sklearn` | scikit-learn | `fcco[sklearn]` |

Nothing here is imported by `import fcco`: import the module you need.
"""

"""Ready pieces for the frameworks that users already have, one module each.

The extra of the same name, `fcco[lightning]` say, installs what a module needs; `open_clip` needs
nothing. `import fcco` imports none of them.
"""

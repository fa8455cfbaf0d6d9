"""JupyterLab for the course: it asks nothing of the network, and does not offer to. `overrides.json` lies beside it."""

from pathlib import Path

c = get_config()  # noqa: F821  given by Jupyter

c.LabApp.app_settings_dir = str(Path(__file__).resolve().parent)
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.extension_manager = "readonly"

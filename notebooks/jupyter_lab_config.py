"""JupyterLab for the course: it asks nothing of the network."""

c = get_config()  # noqa: F821  given by Jupyter

c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.extension_manager = "readonly"
c.ServerApp.allow_remote_access = False

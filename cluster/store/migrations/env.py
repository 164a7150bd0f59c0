"""What Alembic runs: the steps, on the connection that `migrate` gives it, in its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()

"""Access: users, tokens, browser sessions, logins, rate limits, and the audit log.

    request ─► authentication.py ─► Principal (who, and the scopes of this request) ─► the endpoint
                  │  tokens.py      bearer tokens                     users.py       people and their limits
                  │  sessions.py    logins of browsers                rate_limits.py what one client may ask for
                  │  logins.py      proxy headers, OpenID Connect     audit.py       what was done

docs/access.md describes the model.
"""

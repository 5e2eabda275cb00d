/* SPDX-License-Identifier: MIT */
/*
 * The connection to the daemon's vault: vaultwire.h on a socket. For one thread, but for close; and
 * questions of any thread, each on a short connection of its own.
 */
#pragma once

#include <stdbool.h>

#include "vaultwire.h"

/* MPSD_VAULT_SOCKET; NULL where there is none that a socket can have. */
const char *mpsd_channel_path(void);

/* Connect, greet, and show the ledger. False, with the connection left open, where the daemon does not answer. */
bool mpsd_channel_open(void);
bool mpsd_channel_is_open(void);

/* Whether the daemon's side is there still, without asking it anything. */
bool mpsd_channel_is_up(void);

/* Whether there was one to close. */
bool mpsd_channel_close(void);

struct mpsd_vault_message mpsd_channel_message(enum mpsd_vault_kind kind);

/* With a descriptor, unless it is -1. */
bool mpsd_channel_say(const struct mpsd_vault_message *message, int fd);

/* The status of the answer to that; -1 where there is none in time. */
int mpsd_channel_hear(const struct mpsd_vault_message *asked);

/*
 * Greet and ask, on a connection that is made and closed for it. The status, and then `message` is the
 * answer; -1 where there is none in time. `fd` is the descriptor that came with it, the caller's to
 * close, or -1; NULL where none may come.
 */
int mpsd_channel_ask(struct mpsd_vault_message *message, int *fd);

/* The same, with all that was answered. */
int mpsd_channel_answer(const struct mpsd_vault_message *asked, struct mpsd_vault_message *answer);

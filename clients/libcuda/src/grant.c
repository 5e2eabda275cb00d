// SPDX-License-Identifier: MIT
/*
 * On each new connection: whom the daemon watches it must know. One that ends the connection instead of an
 * answer is older than this message, if it does so again, and gets everything else.
 */
#include "grant.h"

#include "channel.h"
#include "notes.h"
#include "zones.h"

#define LAST_TRIES 2

bool mpsd_grant_ask(void)
{
	static int unanswered;
	struct mpsd_vault_message message = mpsd_channel_message(MPSD_VAULT_LEDGER), answer;
	int status = -1;

	if (!mpsd_zones_size() || mpsd_ledger_fd() < 0 || unanswered >= LAST_TRIES)
		return true;
	message.size = sizeof(struct mpsd_ledger);
	if (mpsd_channel_say(&message, mpsd_ledger_fd()))
		status = mpsd_channel_answer(&message, &answer);
	unanswered = status < 0 ? unanswered + 1 : 0;
	if (status == MPSD_VAULT_OK) {
		mpsd_zones_granted(answer.size, answer.count, answer.index >= MPSD_VAULT_READS_FAR);
		while (mpsd_zones_step())
			;
	} else if (status > 0 || unanswered >= LAST_TRIES) {
		mpsd_zones_refused();
	}
	return status >= 0;
}

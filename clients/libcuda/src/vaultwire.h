/* SPDX-License-Identifier: MIT */
/*
 * What is said on RUN/vault.sock (SOCK_SEQPACKET), in both directions: one structure of fixed size per
 * message, in the machine's own byte order, for both ends are on one machine. mpsd/vault/messages.py reads
 * the same, and a test compares the two by what the compiler says.
 *
 *	HELLO	token			once, first; zeros: the owner is the uid in its cgroup
 *	PUT	number, size, address, gpu, one descriptor
 *	DROP	number			answered when nothing of it is held any more
 *	KEEP	name			what this process has brought, and will bring, stays after its end
 *	CLAIM	name, index		answered with one descriptor, of `count` that there are
 *	RELEASE	name			what was kept under it is freed
 *	LEDGER	one descriptor		ledger.h; once per connection. Answered with `size` and `count`: bytes
 *					and number of managed zones that this program may lay; QUOTA: none.
 *					`index`: what the reader knows of the ledger, see below
 *	SHARE	number, token		other processes of the owner may open it, until it is dropped or
 *					its process ends; the token is a new secret, not that of HELLO
 *	OPEN	token			answered with size, gpu and one descriptor
 *	PUT_NAMED  as PUT, name		this piece alone is kept, under a name of its own; answered when the
 *					descriptor store has it too (count 1; 0: it does not answer)
 *	TAKE	name, number, address	what PUT_NAMED kept becomes this process's; answered as CLAIM
 *	LEAVE	number			this process has done with it: the next may take it
 *
 * Each is answered once, in order, by its own kind with MPSD_VAULT_ANSWER added, its sequence and a
 * status. A descriptor comes with PUT, PUT_NAMED and LEDGER, and with a good answer to CLAIM, OPEN and
 * TAKE, and with nothing else. Whoever says anything else is not answered: the connection is closed.
 */
#pragma once

#include <stdint.h>

#define MPSD_VAULT_MAGIC 0x746c7661u	/* "avlt" */
#define MPSD_VAULT_VERSION 1
#define MPSD_VAULT_NAME_ROOM 64
#define MPSD_VAULT_TOKEN_ROOM 32

#define MPSD_VAULT_READS_FAR 1		/* and rows of MPSD_ZONE_FAR; 0: an older daemon */

enum mpsd_vault_kind {
	MPSD_VAULT_HELLO = 1,
	MPSD_VAULT_PUT = 2,
	MPSD_VAULT_DROP = 3,
	MPSD_VAULT_KEEP = 4,
	MPSD_VAULT_CLAIM = 5,
	MPSD_VAULT_RELEASE = 6,
	MPSD_VAULT_LEDGER = 7,
	MPSD_VAULT_SHARE = 8,
	MPSD_VAULT_OPEN = 9,
	MPSD_VAULT_PUT_NAMED = 10,
	MPSD_VAULT_TAKE = 11,
	MPSD_VAULT_LEAVE = 12,
	MPSD_VAULT_ANSWER = 128,
};

enum mpsd_vault_status {
	MPSD_VAULT_OK = 0,
	MPSD_VAULT_QUOTA = 1,		/* not taken; the program goes on without */
	MPSD_VAULT_UNKNOWN = 2,		/* nothing is held under that number */
	MPSD_VAULT_DENIED = 3,		/* this owner has nothing under that name or token, whoever else may */
	MPSD_VAULT_TWICE = 4,		/* that number is held already */
	MPSD_VAULT_NAME = 5,		/* not a name, or another process of the owner keeps it */
	MPSD_VAULT_IN_USE = 16,		/* another living process has it */
};

struct mpsd_vault_message {
	uint32_t magic;
	uint16_t version;
	uint16_t kind;
	uint32_t sequence;		/* the asker's; an answer repeats it */
	uint32_t status;		/* of an answer */
	uint64_t number;		/* how the program calls what it brings */
	uint64_t size;			/* bytes */
	uint64_t address;		/* where the program has it mapped */
	uint32_t index;
	uint32_t count;
	uint8_t gpu[16];		/* as cuDeviceGetUuid says */
	uint8_t token[MPSD_VAULT_TOKEN_ROOM];
	char name[MPSD_VAULT_NAME_ROOM];	/* with a final zero, zeros after it */
};

_Static_assert(sizeof(struct mpsd_vault_message) == 160, "the layout is an interface");

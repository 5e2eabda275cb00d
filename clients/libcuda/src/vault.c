// SPDX-License-Identifier: MIT
/*
 * The thread that brings memory to the daemon (vaultwire.h says how).
 *
 * What waits is handles, not descriptors: a descriptor is exported when it is its turn, sent and closed,
 * so that the program's limit of open files is felt by one. A note that could not be delivered is
 * delivered again on the next connection: the daemon may be restarted at any time and knows then what
 * it has.
 *
 * Long because one lock guards all that can become of a note.
 *
 * A forked child is no client: it has neither the thread nor the right to speak for its parent. Locks
 * may be in any state there, so it takes none: it closes what it inherited and never comes back here.
 */
#include "vault.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "channel.h"
#include "clock.h"
#include "export.h"
#include "failover/carry.h"
#include "proxy.h"
#include "stats.h"
#include "thread.h"
#include "turn.h"

#define MOST_PUTS 4096			/* that wait; what comes then is lost, and counted */
#define FIRST_PAUSE_MS 100
#define LAST_PAUSE_MS 5000
#define SETTLE_MS 250
#define IDLE_MS 500			/* between two looks at a connection on which nothing is said */
#define LAST_TRIES 8			/* connections that end at once: the daemon does not want us */
#define BUCKETS 4096

/*
 * A piece that waits to be brought (PUT), that the daemon has (in `held`), or that waits to be given up
 * (DROP): one note for its whole life, so that giving up needs no memory.
 */
struct note {
	struct note *next;
	enum mpsd_vault_kind kind;
	bool busy;		/* being delivered: not to be struck out */
	bool dropped;		/* freed by the program meanwhile */
	uint64_t base;
	size_t size;
	CUdevice device;
	CUmemGenericAllocationHandle handle;	/* of a PUT */
	uint64_t moves;		/* of a fail-over: in which copy of the driver it is a handle */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct note *first, **last = &first;
static struct note *held[BUCKETS];
static unsigned int puts_waiting, drops_waiting;
static bool started, dropped_lately;
static atomic_bool off;

/* Delivering */

/* The daemon's answer; -1: none, and the connection is of no use any more. */
static int put(const struct note *note)
{
	struct mpsd_vault_message message = mpsd_channel_message(MPSD_VAULT_PUT);
	int status = -1;

	if (!mpsd_export(note->device, note->handle, note->moves, note->base, &off, &message)) {
		mpsd_count(vault_lost);
		return MPSD_VAULT_UNKNOWN;
	}
	message.number = message.address = note->base;
	message.size = note->size;
	if (mpsd_channel_say(&message, mpsd_exported()))
		status = mpsd_channel_hear(&message);
	mpsd_export_close();
	/* Brought before, and the answer got lost: as good. */
	if (status == MPSD_VAULT_TWICE)
		status = MPSD_VAULT_OK;
	if (status == MPSD_VAULT_OK)
		mpsd_count(vault_taken);
	else if (status > 0)
		mpsd_count(vault_refused);
	return status;
}

static int drop(const struct note *note)
{
	struct mpsd_vault_message message = mpsd_channel_message(MPSD_VAULT_DROP);

	message.number = note->base;
	return mpsd_channel_say(&message, -1) ? mpsd_channel_hear(&message) : -1;
}

static int deliver(const struct note *note)
{
	if (!mpsd_channel_is_open() && !mpsd_channel_open())
		return -1;
	return note->kind == MPSD_VAULT_PUT ? put(note) : drop(note);
}

static void release(CUmemGenericAllocationHandle handle, uint64_t moves)
{
	bool turn = mpsd_turn_take();

	/* Without it, or in another copy, the driver is about to go, and the handle with it. */
	if (turn && moves == mpsd_tables()->moves)
		real_cuMemRelease(handle);
	mpsd_turn_give(turn);
}

static struct note **bucket_of(uint64_t base)
{
	return &held[(base >> 21) % BUCKETS];
}

/* Under the lock. */
static void add(struct note *note)
{
	note->next = NULL;
	note->busy = false;
	*last = note;
	last = &note->next;
	if (note->kind == MPSD_VAULT_PUT)
		puts_waiting++;
	else
		drops_waiting++;
	dropped_lately |= note->kind == MPSD_VAULT_DROP;
	pthread_cond_broadcast(&changed);
}

/* Under the lock: take what `link` leads to out of those that wait. */
static struct note *take(struct note **link)
{
	struct note *note = *link;

	*link = note->next;
	if (!note->next)
		last = link;
	if (note->kind == MPSD_VAULT_PUT)
		puts_waiting--;
	else
		drops_waiting--;
	pthread_cond_broadcast(&changed);
	return note;
}

/* NULL where none came in a while. */
static struct note *next_note(void)
{
	struct timespec until = mpsd_in(IDLE_MS);
	struct note *note;

	pthread_mutex_lock(&lock);
	while (!first && !pthread_cond_timedwait(&changed, &lock, &until))
		;
	note = first;
	if (note)
		note->busy = true;
	pthread_mutex_unlock(&lock);
	return note;
}

/* The first one has been heard. */
static void done(struct note *note, bool taken)
{
	CUmemGenericAllocationHandle handle = note->handle;
	bool is_put = note->kind == MPSD_VAULT_PUT;

	/* Before anybody may believe that it is given up. */
	if (is_put)
		release(handle, note->moves);
	pthread_mutex_lock(&lock);
	take(&first);
	if (note->dropped)
		drops_waiting--;
	if (is_put && taken && note->dropped) {
		note->dropped = false;
		note->kind = MPSD_VAULT_DROP;
		add(note);
	} else if (is_put && taken) {
		note->next = *bucket_of(note->base);
		*bucket_of(note->base) = note;
	} else {
		free(note);
	}
	pthread_mutex_unlock(&lock);
}

/* It was not heard, or its answer was not: what the program has freed meanwhile is given up all the same. */
static void later(struct note *note)
{
	bool given_up;

	pthread_mutex_lock(&lock);
	note->busy = false;
	given_up = note->dropped;
	pthread_mutex_unlock(&lock);
	if (!given_up)
		return;
	/* Nobody else touches a note that was dropped. */
	release(note->handle, note->moves);
	pthread_mutex_lock(&lock);
	note->kind = MPSD_VAULT_DROP;
	note->dropped = false;
	puts_waiting--;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

/*
 * Nothing is to be brought, and perhaps never will be again: the next daemon must be shown the ledger all the
 * same, or it hears of no hit. Returns how many connections have ended one after another.
 */
static int keep_up(int ended)
{
	if (mpsd_channel_is_open() && mpsd_channel_is_up())
		return 0;
	ended += mpsd_channel_close();
	if (ended < LAST_TRIES && !mpsd_channel_open())
		ended += mpsd_channel_close();
	return ended;
}

/* A daemon that is not there may come back; one that ends each connection does not want us. */
static void *bring(void *unused)
{
	int pause_ms = FIRST_PAUSE_MS, ended = 0, status;

	(void)unused;
	while (!atomic_load(&off)) {
		struct note *note = next_note();

		if (!note) {
			ended = ended < LAST_TRIES ? keep_up(ended) : ended;
			continue;
		}
		if (ended >= LAST_TRIES) {
			if (note->kind == MPSD_VAULT_PUT)
				mpsd_count(vault_lost);
			done(note, false);
			continue;
		}
		status = deliver(note);
		if (status >= 0) {
			pause_ms = FIRST_PAUSE_MS;
			ended = 0;
			done(note, status == MPSD_VAULT_OK);
			continue;
		}
		later(note);
		ended += mpsd_channel_close();
		mpsd_pause(pause_ms);
		pause_ms = pause_ms * 2 < LAST_PAUSE_MS ? pause_ms * 2 : LAST_PAUSE_MS;
	}
	return NULL;
}

/* Starting and ending */

static void in_child(void)
{
	atomic_store(&off, true);
	mpsd_channel_close();
	mpsd_export_close();
}

/* The driver is about to go: nothing of ours calls it any more. */
static void at_end(void)
{
	if (!atomic_exchange(&off, true))
		mpsd_turn_keep();
}

/* Under the lock. The thread's thread-local storage is taken from our stack. */
static bool start(void)
{
	static bool failed;

	if (started)
		return true;
	if (!mpsd_channel_path())
		return false;
	started = mpsd_thread_start(bring, NULL);
	if (started) {
		pthread_atfork(NULL, NULL, in_child);
		atexit(at_end);
	} else if (!failed) {
		mpsd_say("vault and guard zones disabled: cannot create a thread; raise TasksMax or ulimit -u");
	}
	failed = !started;
	return started;
}

bool mpsd_vault_put(uint64_t base, size_t size, CUdevice device, CUmemGenericAllocationHandle handle)
{
	struct note *note;
	bool taken;

	if (atomic_load(&off) || !mpsd_channel_path())
		return false;
	note = malloc(sizeof(*note));
	pthread_mutex_lock(&lock);
	taken = note && puts_waiting < MOST_PUTS && start();
	if (taken) {
		*note = (struct note){ NULL, MPSD_VAULT_PUT, false, false, base, size, device, handle,
					 mpsd_tables()->moves };
		add(note);
	}
	pthread_mutex_unlock(&lock);
	if (!taken) {
		free(note);
		mpsd_count(vault_lost);
	}
	return taken;
}

static struct note **find(struct note **link, uint64_t base)
{
	while (*link && ((*link)->kind != MPSD_VAULT_PUT || (*link)->base != base || (*link)->dropped))
		link = &(*link)->next;
	return link;
}

/* What was never brought (too much waited, no memory) is found nowhere, and needs no word. */
void mpsd_vault_drop(uint64_t base)
{
	struct note **link, *struck = NULL;

	if (atomic_load(&off))
		return;
	pthread_mutex_lock(&lock);
	link = find(&first, base);
	if (*link && (*link)->busy) {
		(*link)->dropped = dropped_lately = true;
		drops_waiting++;
	} else if (*link) {
		struck = take(link);
	} else {
		link = find(bucket_of(base), base);
		if (*link) {
			struct note *note = *link;

			*link = note->next;
			note->kind = MPSD_VAULT_DROP;
			add(note);
		}
	}
	pthread_mutex_unlock(&lock);
	if (struck)
		release(struck->handle, struck->moves);
	free(struck);
}

bool mpsd_vault_await(uint64_t base, int milliseconds)
{
	struct timespec until = mpsd_in(milliseconds);
	bool has;

	if (atomic_load(&off))
		return false;
	pthread_mutex_lock(&lock);
	while (*find(&first, base) && !pthread_cond_timedwait(&changed, &lock, &until))
		;
	has = *find(bucket_of(base), base) != NULL;
	pthread_mutex_unlock(&lock);
	return has;
}

bool mpsd_vault_settle(void)
{
	struct timespec until = mpsd_in(SETTLE_MS);
	bool waited;

	if (atomic_load(&off))
		return false;
	pthread_mutex_lock(&lock);
	waited = dropped_lately;
	while (drops_waiting && !pthread_cond_timedwait(&changed, &lock, &until))
		;
	/* With no daemon there every allocation that fails would wait. */
	dropped_lately = false;
	pthread_mutex_unlock(&lock);
	return waited;
}

// SPDX-License-Identifier: MIT
/*
 * MPSD_FAILOVER=validate: whether what operations write is what is saved before them. After each one the GPU comes
 * to rest, and every page of the window is compared with what it was (by sums: pages.c). A page that changed and was not
 * saved is an operation's that follows pointers which its parameters do not show; a variable of a module that changed
 * (globals.c) is not carried over. For tests of programs: each operation costs a look at all of the program's memory.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exact/globals.h"
#include "exact/named.h"
#include "exact/pages.h"
#include "exact/params.h"
#include "exact/readers.h"
#include "exact/stamps.h"
#include "exact/symbols.h"
#include "exact/validate.h"
#include "exact/undo.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/wish.h"
#include "stats.h"
#include "windows.h"

#define MOST_NAMES 256

static struct {
	bool is_seen;		/* what the last operation has changed is known */
	bool is_there;		/* sums are those of now, but for what the next operation does */
	uint64_t moves, changes;	/* as the sums are of */
	uint64_t *sums;		/* of each page of the first window; 0: not mapped */
	uint64_t *changed, looks;	/* in which look at an operation it was found changed last; so many there were */
	struct arena_range *pieces;
	size_t count, room, pages;
} known;

static struct names {
	char *names[MOST_NAMES];
	unsigned int count;
} writers, keepers;	/* where no parameter leads; of variables */

static MPSD_READ_OFTEN atomic_bool is_on, is_over;

void mpsd_validate_start(void)
{
	is_on = mpsd_wish()->validates;
	if (is_on)
		mpsd_symbols_start();
}

bool mpsd_validates(void)
{
	return is_on && !is_over;
}

static const char *name_of(const struct mpsd_op *op)
{
	const char *name = op->kind == MPSD_OP_LAUNCH ? mpsd_name_of_function(op->launch.function) : NULL;

	if (name)
		return name;
	return op->kind == MPSD_OP_LAUNCH ? "a kernel" : op->kind == MPSD_OP_GRAPH ? "a graph" : "a copy, memset or memory operation";
}

void mpsd_validate_end(const char *why)
{
	if (is_on && !atomic_exchange(&is_over, true))
		mpsd_say("validation stopped: %s", why);
}

/* Each is named once. */
static bool is_news(const struct mpsd_op *op, struct names *list)
{
	const char *name = name_of(op);

	for (unsigned int i = 0; i < list->count; i++)
		if (!strcmp(list->names[i], name))
			return false;
	if (list->count < MOST_NAMES && (list->names[list->count] = strdup(name)))
		list->count++;
	return true;
}

static void write_names(FILE *text, const char *kind, const struct names *list)
{
	for (unsigned int i = 0; i < list->count; i++)
		if (!strchr(list->names[i], ' '))
			fprintf(text, "%s%s:%s", ftell(text) ? "," : "", kind, list->names[i]);
}

/* As named.c reads them. */
static void say_names(void)
{
	char *line = NULL;
	size_t size = 0;
	FILE *text = open_memstream(&line, &size);

	if (text) {
		write_names(text, "unsure", &writers);
		write_names(text, "opaque", &keepers);
	}
	if (text && !fclose(text) && size)
		mpsd_say("to make fail-over report these kernels instead of replaying them: MPSD_FAILOVER_KERNELS=%s", line);
	free(line);
}

static void note_first(const struct mpsd_op *op, const char *variable)
{
	size_t room = sizeof(mpsd_stats->validate_first);

	if (mpsd_stats->validate_strays + mpsd_stats->validate_variables == 1)
		snprintf(mpsd_stats->validate_first, room, "%s%s%s", name_of(op), variable ? ": " : "",
			 variable ? variable : "");
}

static void tell_page(const struct mpsd_op *op, uint64_t address)
{
	mpsd_stats->validate_strays++;
	note_first(op, NULL);
	if (is_news(op, &writers))
		mpsd_say("%s writes at 0x%llx, which its parameters do not reach: the write cannot be rolled back", name_of(op),
			 (unsigned long long)address);
}

static void tell_variable(const struct mpsd_op *op, const char *variable)
{
	mpsd_stats->validate_variables++;
	note_first(op, variable);
	if (is_news(op, &keepers))
		mpsd_say("%s writes the module variable %s, which fail-over does not preserve", name_of(op), variable);
}

/* What the program maps itself is there to be read when it has said who may. */
static bool is_open(const struct window *window, const struct arena_range *piece)
{
	struct arena_range of;

	return !arena_held(&window->arena, piece->base, &of) || arena_run(&window->arena, piece->base, &of);
}

/* With the lock of the windows. False: no memory. */
static bool find_pieces(const struct window *window)
{
	struct arena_range piece = { window->arena.base, 0 };

	known.count = known.pages = 0;
	while (arena_next_piece(&window->arena, piece.base + piece.size, &piece)) {
		if (!is_open(window, &piece))
			continue;
		known.pages += piece.size / MPSD_EXACT_PAGE;
		/* One kernel looks at all that lies side by side: what a program maps itself comes in many small pieces. */
		if (known.count && known.pieces[known.count - 1].base + known.pieces[known.count - 1].size == piece.base) {
			known.pieces[known.count - 1].size += piece.size;
			continue;
		}
		if (known.count == known.room) {
			size_t room = known.room ? 2 * known.room : 64;
			struct arena_range *more = realloc(known.pieces, room * sizeof(*more));

			if (!more)
				return false;
			known.pieces = more;
			known.room = room;
		}
		known.pieces[known.count++] = piece;
	}
	return true;
}

/* `op` NULL: nothing has happened. */
static void compare(const struct mpsd_op *op, const uint64_t *sums, uint64_t base)
{
	for (size_t i = 0; i < known.count; i++) {
		const struct arena_range *piece = &known.pieces[i];

		for (uint64_t at = piece->base; at < piece->base + piece->size; at += MPSD_EXACT_PAGE) {
			uint64_t *was = &known.sums[(at - base) / MPSD_EXACT_PAGE], is = *sums++ | 1;

			if (op && *was && *was != is) {
				known.changed[(at - base) / MPSD_EXACT_PAGE] = known.looks;
				if (!mpsd_undo_is_saved(at))
					tell_page(op, at);
			}
			*was = is;
		}
	}
}

/*
 * With the lock of the windows, so that nothing is unmapped meanwhile. BUSY: the room for the sums is too small by now.
 */
static CUresult look_with_lock(const struct window *window, size_t room, const struct mpsd_op *op)
{
	bool is_news = known.changes != window->arena.changes;
	const uint64_t *sums;
	CUresult result;

	if (!known.sums)
		known.sums = calloc(window->arena.granules, sizeof(*known.sums));
	if (!known.changed)
		known.changed = calloc(window->arena.granules, sizeof(*known.changed));
	if (!known.sums || !known.changed || !find_pieces(window))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (known.pages > room)
		return CUDA_ERROR_NOT_READY;
	result = mpsd_pages_sum(known.pieces, known.count, &sums);
	if (result != CUDA_SUCCESS)
		return result;
	/* What came meanwhile at addresses that another piece had is no write. */
	known.looks++;
	compare(is_news ? NULL : op, sums, window->arena.base);
	known.is_seen = op && !is_news;
	known.changes = window->arena.changes;
	known.moves = mpsd_tables()->moves;
	return CUDA_SUCCESS;
}

static bool look(const struct mpsd_op *op)
{
	const struct window *window = &mpsd_windows[0];
	CUresult result;

	do {
		size_t room = known.pages + known.pages / 4;

		result = mpsd_pages_ready(room);
		if (result != CUDA_SUCCESS)
			break;
		pthread_mutex_lock(&mpsd_windows_lock);
		result = window->open ? look_with_lock(window, room, op) : CUDA_SUCCESS;
		pthread_mutex_unlock(&mpsd_windows_lock);
	} while (result == CUDA_ERROR_NOT_READY);
	/* What is lost is moved: then all is looked at anew. */
	if (result != CUDA_SUCCESS && !mpsd_is_loss(result) && !mpsd_is_left()) {
		char why[64];

		snprintf(why, sizeof(why), "reading the memory failed (%d)", result);
		mpsd_validate_end(why);
	}
	return result == CUDA_SUCCESS;
}

static bool is_as_known(void)
{
	bool is;

	pthread_mutex_lock(&mpsd_windows_lock);
	is = known.is_there && known.changes == mpsd_windows[0].arena.changes && known.moves == mpsd_tables()->moves;
	pthread_mutex_unlock(&mpsd_windows_lock);
	return is;
}

void mpsd_validate_before(const struct mpsd_op *op)
{
	if (!is_as_known())
		known.is_there = look(NULL);
	if (known.is_there)
		mpsd_globals_before(op);
}

static bool has_changed(struct mpsd_pages pages)
{
	for (uint64_t page = pages.first; page < pages.end; page++)
		if (known.changed[page] == known.looks)
			return true;
	return false;
}

/* Nobody has looked. */
static bool may_have_changed(struct mpsd_pages pages)
{
	(void)pages;
	return true;
}

/* By which parameters kernels write, and by which they only read. Of the kernels of a graph all may have written. */
static void learn(const struct mpsd_op *op, bool (*is_changed)(struct mpsd_pages pages))
{
	/* Pages have the same numbers only then. */
	if (mpsd_stamps_address(0) != mpsd_windows[0].arena.base)
		return;
	if (op->kind == MPSD_OP_GRAPH)
		mpsd_graph_each(op->graph.graph, mpsd_params_learn, &is_changed);
	else
		mpsd_params_learn(op, &is_changed);
	mpsd_readers_keep(false);
}

/*
 * Its saves, and the room they are in, are the proxy's own doing. What goes wrong with the wait is not the operation's, which
 * the driver has taken: the next call finds it.
 */
void mpsd_validate_after(const struct mpsd_op *op)
{
	const char *variable;
	uint64_t at = 0;
	bool was_there = known.is_there, is_unsure;

	known.is_there = false;
	/* What the GPU waits for may be what this thread does next, or a thread that wants the order. */
	if (op->kind == MPSD_OP_HOST || mpsd_hosts_are_open() || mpsd_epoch_is_waiting()) {
		learn(op, may_have_changed);
		return;
	}
	if (mpsd_lanes_mark() != CUDA_SUCCESS || mpsd_lanes_wait() != CUDA_SUCCESS || !was_there)
		return;
	/* Some of what it writes was not saved, and the daemon knows of it. */
	is_unsure = mpsd_epoch_is_unsure();
	if (is_unsure) {
		mpsd_stats->validate_unsure++;
		learn(op, may_have_changed);
	} else {
		mpsd_stats->validated++;
	}
	known.is_there = look(is_unsure ? NULL : op);
	if (known.is_there && known.is_seen)
		learn(op, has_changed);
	while (known.is_there && (variable = mpsd_globals_changed(&at)))
		tell_variable(op, variable);
	mpsd_stats->validate_unread = mpsd_globals_unknown();
}

void mpsd_validate_report(void)
{
	const struct mpsd_stats *found = mpsd_stats;

	if (is_on)
		mpsd_say("validated%s: %llu operations, %llu pages written outside parameters, %llu writes of module variables; "
			 "not checked: %llu operations that cannot be rolled back, %llu code images",
			 is_over ? " until validation stopped" : "", (unsigned long long)found->validated,
			 (unsigned long long)found->validate_strays, (unsigned long long)found->validate_variables,
			 (unsigned long long)found->validate_unsure, (unsigned long long)found->validate_unread);
	mpsd_readers_keep(true);
	say_names();
	/* What ends from here on ends with the program. */
	is_on = false;
}

// SPDX-License-Identifier: MIT
/* Functions of the host: which there are, and who runs them. */
#include <stdlib.h>

#include "clock.h"
#include "exact/hostfunc.h"
#include "thread.h"

#define LONG_NS 1000000000ull
#define MOST_RUN_MS 1000

pthread_mutex_t mpsd_hosts_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t mpsd_hosts_changed = PTHREAD_COND_INITIALIZER;

static struct mpsd_host *oldest, *newest;	/* of those that are open */
static struct mpsd_given *givens;
static atomic_uint open_count;
static bool tells;				/* there is a thread that does */

void mpsd_host_open(struct mpsd_host *host)
{
	host->older = newest;
	*(newest ? &newest->newer : &oldest) = host;
	newest = host;
	atomic_fetch_add(&open_count, 1);
}

bool mpsd_host_is_open(const struct mpsd_host *host)
{
	return host->older || oldest == host;
}

void mpsd_host_close(struct mpsd_host *host, enum mpsd_host_state state)
{
	host->state = state;
	if (!mpsd_host_is_open(host))
		return;
	*(host->older ? &host->older->newer : &oldest) = host->newer;
	*(host->newer ? &host->newer->older : &newest) = host->older;
	host->older = host->newer = NULL;
	atomic_fetch_sub(&open_count, 1);
}

static bool is_to_be_told(const struct mpsd_host *host)
{
	return host->state == OWED || (host->state == WAITS && host->status != CUDA_SUCCESS);
}

static void free_unused(struct mpsd_host *host)
{
	if (host->holders || host->givens || host->state == RUNS || is_to_be_told(host))
		return;
	if (host->state == WAITS && host->is_passed)
		return;
	mpsd_host_close(host, LOST);
	free(host);
}

void mpsd_host_hold(struct mpsd_host *host)
{
	pthread_mutex_lock(&mpsd_hosts_lock);
	host->holders++;
	pthread_mutex_unlock(&mpsd_hosts_lock);
}

void mpsd_host_let_go(struct mpsd_host *host)
{
	pthread_mutex_lock(&mpsd_hosts_lock);
	host->holders--;
	free_unused(host);
	pthread_mutex_unlock(&mpsd_hosts_lock);
}

void mpsd_given_begin(struct mpsd_given *given)
{
	given->newer = givens;
	if (givens)
		givens->older = given;
	givens = given;
	given->host->givens++;
}

void mpsd_given_end(struct mpsd_given *given)
{
	struct mpsd_host *host = given->host;

	*(given->older ? &given->older->newer : &givens) = given->newer;
	if (given->newer)
		given->newer->older = given->older;
	free(given);
	host->givens--;
	free_unused(host);
}

void mpsd_hosts_copy_went(uint64_t moves)
{
	struct mpsd_given *next;

	pthread_mutex_lock(&mpsd_hosts_lock);
	for (struct mpsd_given *given = givens; given; given = next) {
		next = given->newer;
		if (given->moves == moves)
			mpsd_given_end(given);
	}
	pthread_mutex_unlock(&mpsd_hosts_lock);
}

bool mpsd_hosts_are_open(void)
{
	return atomic_load(&open_count) != 0;
}

bool mpsd_hosts_keep(void)
{
	uint64_t now = mpsd_now_ns();
	bool is = false;

	if (!mpsd_hosts_are_open())
		return false;
	pthread_mutex_lock(&mpsd_hosts_lock);
	for (const struct mpsd_host *host = oldest; host && !is; host = host->newer)
		is = host->state == RUNS && now > host->since_ns + LONG_NS;
	pthread_mutex_unlock(&mpsd_hosts_lock);
	return is;
}

bool mpsd_host_has_run(struct mpsd_host *host)
{
	bool has;

	pthread_mutex_lock(&mpsd_hosts_lock);
	has = host->state == DONE;
	pthread_mutex_unlock(&mpsd_hosts_lock);
	return has;
}

void mpsd_host_run(struct mpsd_host *host, CUresult status)
{
	host->state = RUNS;
	host->since_ns = mpsd_now_ns();
	pthread_mutex_unlock(&mpsd_hosts_lock);
	mpsd_thread.in_host_function = true;
	if (host->kind == CALLBACK)
		host->callback(host->stream, status, host->data);
	else
		host->function(host->data);
	mpsd_thread.in_host_function = false;
	pthread_mutex_lock(&mpsd_hosts_lock);
	mpsd_host_close(host, DONE);
	pthread_cond_broadcast(&mpsd_hosts_changed);
}

/* The next callback that has to be told an error, or may have to be. */
static struct mpsd_host *to_be_told(void)
{
	struct mpsd_host *host = oldest;

	while (host && !is_to_be_told(host))
		host = host->newer;
	return host;
}

/* Nothing was moved, or not this: what was said in that copy is so. */
static void owe(uint64_t moves)
{
	for (struct mpsd_host *host = oldest; host; host = host->newer)
		if (host->state == WAITS && host->status != CUDA_SUCCESS && host->said_in == moves)
			host->state = OWED;
}

static void *tell(void *unused)
{
	struct mpsd_host *host;

	(void)unused;
	pthread_mutex_lock(&mpsd_hosts_lock);
	while ((host = to_be_told())) {
		CUresult status = host->status;
		uint64_t moves = host->said_in;
		bool has_word, is_over;

		if (host->state == OWED) {
			mpsd_host_run(host, status);
			free_unused(host);
			continue;
		}
		pthread_mutex_unlock(&mpsd_hosts_lock);
		has_word = mpsd_phase_word(status, moves);
		is_over = atomic_load(&mpsd_moves) == mpsd_moves_done() && mpsd_moves_done() != moves;
		pthread_mutex_lock(&mpsd_hosts_lock);
		if (!has_word || is_over)
			owe(moves);
	}
	tells = false;
	pthread_mutex_unlock(&mpsd_hosts_lock);
	return NULL;
}

bool mpsd_hosts_tell(void)
{
	tells = tells || mpsd_thread_start(tell, NULL);
	return tells;
}

static bool does_any_run(void)
{
	const struct mpsd_host *host = oldest;

	while (host && host->state != RUNS)
		host = host->newer;
	return host;
}

/* The program goes on without what is lost: not beside one that works on it, unless that waits for the program. */
void mpsd_hosts_lose(void)
{
	struct timespec until = mpsd_in(MOST_RUN_MS);
	struct mpsd_host *next;

	pthread_mutex_lock(&mpsd_hosts_lock);
	while (does_any_run() && !pthread_cond_timedwait(&mpsd_hosts_changed, &mpsd_hosts_lock, &until))
		;
	for (struct mpsd_host *host = oldest; host; host = next) {
		next = host->newer;
		if (host->state != WAITS)
			continue;
		if (host->kind != CALLBACK) {
			mpsd_host_close(host, LOST);
			free_unused(host);
			continue;
		}
		host->state = OWED;
		host->status = host->status == CUDA_SUCCESS ? CUDA_ERROR_LAUNCH_FAILED : host->status;
		mpsd_hosts_tell();
	}
	pthread_cond_broadcast(&mpsd_hosts_changed);
	pthread_mutex_unlock(&mpsd_hosts_lock);
}

void mpsd_hosts_child(void)
{
	mpsd_hosts_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

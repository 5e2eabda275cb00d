// SPDX-License-Identifier: MIT
/*
 * One thread per program: it hears of standbys and makes them, follows what the program makes, and moves the
 * program when it is told to. The program's threads leave it notes, and wait for it in a move alone. With no
 * daemon there is no standby, and what the program does is as it would be. A forked child is no client: it has
 * neither the thread nor the connection.
 */
#include "failover/line.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"
#include "connect.h"
#include "exact/exact.h"
#include "exact/leave.h"
#include "failover/blame.h"
#include "failover/budgets.h"
#include "failover/carry.h"
#include "failover/cost.h"
#include "failover/fence.h"
#include "failover/graph.h"
#include "failover/kept.h"
#include "failover/made.h"
#include "failover/move.h"
#include "failover/rescue.h"
#include "failover/room.h"
#include "failover/wish.h"
#include "failoverwire.h"
#include "thread.h"

#define FIRST_PAUSE_MS 100
#define LAST_PAUSE_MS 5000
#define LAST_TRIES 8
#define SHORT_NS 1000000000ull	/* a connection that ends sooner */
#define AGAIN_PAUSE_MS 1000	/* at most, after a short connection with a welcome */
#define END_MS 2000
#define SEND_S 2

static uint32_t mode;		/* wished; then granted */

static atomic_int line = -1, wake = -1;
static atomic_bool off, ready, given_up, woken, behind;
static bool welcomed;		/* on this connection */
static atomic_uint_least64_t comes_until_ns;	/* after a move, the next standby */
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;	/* the thread calls a copy */
static uint64_t generation;	/* of the standby that there is, or that was asked for; 0: none */
static uint64_t home;		/* where the program lives; 0: in its first context */
static bool went_for_memory;	/* the last standby, or it could not be made for that */

/* From the program's threads */

void mpsd_line_wake(void)
{
	uint64_t one = 1;
	int fd = atomic_load(&wake);

	if (fd >= 0 && !atomic_exchange(&woken, true) && write(fd, &one, sizeof(one)) < 0)
		atomic_store(&woken, false);
}

static bool may_move(void)
{
	return !atomic_load(&given_up) && !atomic_load(&behind) && !atomic_load(&mpsd_opaque_notes()->count) &&
	       !atomic_load(&off) && !mpsd_leave_has();
}

bool mpsd_line_ready(void)
{
	return atomic_load(&ready) && may_move();
}

int mpsd_line_word_ms(void)
{
	uint64_t now = mpsd_now_ns(), until = atomic_load(&comes_until_ns);

	if (!may_move())
		return 0;
	if (atomic_load(&ready))
		return mpsd_rescue_hold_ms();
	return atomic_load(&line) >= 0 && now < until ? (int)((until - now) / 1000000) + 1 : 0;
}

void mpsd_line_moves(void)
{
	/* From here on: what is done again may fault before the mover is back. */
	atomic_store(&comes_until_ns, mpsd_now_ns() + mpsd_wish()->patience_ns);
	atomic_store(&ready, false);
}

void mpsd_line_give_up(void)
{
	atomic_store(&given_up, true);
}

bool mpsd_line_is_behind(void)
{
	return atomic_load(&behind);
}

static bool say(const struct mpsd_failover_message *message)
{
	return mpsd_line_say(atomic_load(&line), message);
}

/* The thread */

/* Until the daemon offers another one. */
static void end_standby(void)
{
	atomic_store(&ready, false);
	mpsd_phase_wake();
	mpsd_standby_close();
}

static bool say_unready(const char *why, bool for_memory)
{
	bool is;

	went_for_memory = atomic_exchange(&mpsd_cost_was_short, false) || for_memory;
	atomic_store(&ready, false);
	/* First: where the domain is lost meanwhile nobody is told to move into it. */
	is = mpsd_line_tell_unready(atomic_load(&line), generation, why, went_for_memory);
	mpsd_standby_close();
	return is;
}

static bool stand_by(const struct mpsd_failover_message *order)
{
	const char *why = NULL;
	uint64_t began = mpsd_now_ns();

	/* A daemon that has come back offers what there is already. */
	if (order->generation == generation && atomic_load(&ready))
		return mpsd_line_tell_ready(atomic_load(&line), generation, 0);
	atomic_store(&ready, false);
	if (mpsd_leave_has()) {
		end_standby();
		return mpsd_budgets_refuse(atomic_load(&line), order->generation);
	}
	generation = order->generation;
	if (atomic_load(&mpsd_opaque_notes()->count)) {
		mpsd_standby_close();
		return true;
	}
	if (went_for_memory && !mpsd_cost_is_there())
		return say_unready("too little free GPU memory for a standby context", true);
	if (!mpsd_standby_offer(generation, order->path, order->text, &why))
		return say_unready(why, false);
	atomic_store(&given_up, false);
	mpsd_own_error_forget();
	atomic_store(&ready, true);
	atomic_store(&behind, false);
	mpsd_phase_wake();
	return mpsd_line_tell_ready(atomic_load(&line), generation, mpsd_now_ns() - began);
}

/* What was told of a move after which the program waits for its turn: a daemon that connects later is told it again. */
static struct {
	struct mpsd_times times;
	uint64_t began;
} waiting;

static bool say_waits(void)
{
	return mpsd_line_tell_moved(atomic_load(&line), home, &waiting.times, waiting.began, false);
}

static bool have_turn(bool may)
{
	return !mpsd_turn_is_due() || mpsd_turn_have(may, atomic_load(&line), home);
}

/* Whether it says that the exception was not its own. */
static bool denies(const struct mpsd_times *times)
{
	return times->whose == MPSD_FAILOVER_WHOSE_OTHERS || times->whose == MPSD_FAILOVER_WHOSE_NO_SIGN;
}

static void has_moved(const struct mpsd_times *times, uint64_t began)
{
	home = generation;
	generation = 0;
	waiting.times = *times;
	waiting.began = began;
	atomic_store(&comes_until_ns, mpsd_now_ns() + mpsd_wish()->patience_ns);
}

static void stay(void)
{
	atomic_store(&comes_until_ns, 0);
	atomic_store(&ready, false);
	mpsd_phase_wake();
	mpsd_standby_close();
}

static bool move(const struct mpsd_failover_message *order)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_STAYED, order->generation,
								"no standby context of that generation");
	uint64_t began = mpsd_now_ns();
	struct mpsd_move_order how;
	struct mpsd_times times;
	const char *why = NULL;
	bool is, goes_on;

	if (order->generation == home && home) {
		if (mpsd_turn_is_due())
			return say_waits();
		message = mpsd_line_message(MPSD_FAILOVER_MOVED, home, NULL);
		return say(&message);
	}
	if (order->generation != generation || !mpsd_line_ready())
		return say(&message);
	mpsd_fence_listen(order->values[0] ? -1 : atomic_load(&line), generation);
	how = (struct mpsd_move_order){ order->values[0] != 0, (enum mpsd_failover_again)order->values[1], !order->values[2],
					order->values[4] != 0 };
	if (!mpsd_move(&how, &times, &why)) {
		message = mpsd_line_message(MPSD_FAILOVER_STAYED, generation, why);
		stay();
		return say(&message);
	}
	has_moved(&times, began);
	goes_on = order->values[3] && denies(&times) && mpsd_turn_is_due();
	is = mpsd_line_tell_moved(atomic_load(&line), home, &times, began, goes_on);
	/* Whether or not there is still somebody to hear of it. */
	if (goes_on || order->values[1] == MPSD_FAILOVER_AT_ONCE)
		is = have_turn(true) && is;
	return is;
}

/*
 * No daemon says what is to be done. Where what the program finds denies the fault it goes on at once; else its work may
 * fault again beside others, so it waits for a daemon that gives it a domain of its own, or gives up.
 */
static void go_on_alone(void)
{
	if (denies(&waiting.times))
		have_turn(true);
}

static void rescue(void)
{
	struct mpsd_move_order how = { false, mode == MPSD_FAILOVER_EXACT ? MPSD_FAILOVER_IN_TURN : MPSD_FAILOVER_LOST, true, false };
	uint64_t began = mpsd_now_ns();
	struct mpsd_times times;
	const char *why = NULL;

	/* The next daemon is told of no error of a context that was left. */
	mpsd_own_error_take();
	mpsd_fence_listen(-1, generation);
	if (!mpsd_move(&how, &times, &why)) {
		generation = 0;
		stay();
		mpsd_say("cannot fail over without mpsd: %s; start mpsd again", why);
		return;
	}
	has_moved(&times, began);
	mpsd_say("failed over without mpsd, which did not answer; start mpsd again for the next fault");
	go_on_alone();
}

/* While the context is lost, and whether or not there is a daemon. */
static void rescue_if_due(int fd)
{
	enum mpsd_rescue what = mpsd_turn_is_due() ? MPSD_RESCUE_WAIT : mpsd_rescue_now(fd);

	if (what == MPSD_RESCUE_GIVE_UP) {
		mpsd_line_give_up();
		mpsd_phase_wake();
	} else if (what == MPSD_RESCUE_MOVE && generation && !atomic_load(&off)) {
		rescue();
	}
}

static bool stand_down(const struct mpsd_failover_message *order)
{
	atomic_store(&behind, order->values[0] != 0);
	mpsd_phase_wake();
	if (order->generation != generation)
		return true;
	end_standby();
	generation = 0;
	return true;
}

/* Tell the daemon before the standby context ends, so that it does not move the program there. */
static bool follow_budgets(void)
{
	bool is;

	mpsd_leave_follow();
	is = mpsd_budgets_tell();
	if (is && mpsd_leave_has() && generation) {
		end_standby();
		generation = 0;
	}
	return is;
}

static bool obey(const struct mpsd_failover_message *order)
{
	if (order->magic != MPSD_FAILOVER_MAGIC || order->version != MPSD_FAILOVER_VERSION ||
	    !memchr(order->path, 0, sizeof(order->path)) || !memchr(order->text, 0, sizeof(order->text)))
		return false;
	switch ((int)order->kind) {
	case MPSD_FAILOVER_WELCOME:
		welcomed = true;
		mode = order->mode;
		mpsd_standby_lazy(order->values[0] != 0);
		mpsd_room_may_ask(order->values[1] != 0);
		mpsd_blame_may_tell(order->values[2] > 2 ? 2 : (unsigned int)order->values[2]);
		mpsd_left_may_tell(order->values[3] ? atomic_load(&line) : -1);
		mpsd_budgets_welcome(atomic_load(&line), order);
		if (mode != MPSD_FAILOVER_EXACT)
			mpsd_exact_stop("mode keep in the daemon's configuration");
		/* A daemon of an earlier release takes a program on a new connection for one that does not wait. */
		if (mpsd_turn_is_due() && (order->values[2] < 2 || !say_waits()))
			mpsd_turn_forgo();
		return follow_budgets();
	case MPSD_FAILOVER_STANDBY:
		return stand_by(order);
	case MPSD_FAILOVER_STAND_DOWN:
		return stand_down(order);
	case MPSD_FAILOVER_MOVE:
		return move(order);
	case MPSD_FAILOVER_TURN:
		return order->generation != home || have_turn(true);
	case MPSD_FAILOVER_FENCED:
		return mpsd_fence_told(order->generation), true;
	case MPSD_FAILOVER_LIMIT:
		return mpsd_budgets_limit(order), follow_budgets();
	case MPSD_FAILOVER_GUARD:
		return mpsd_leave_order(), follow_budgets();
	case MPSD_FAILOVER_GIVE:
	case MPSD_FAILOVER_ROOM:
		return mpsd_room_told(order), true;
	default:
		return false;
	}
}

static bool tell(struct mpsd_told *told)
{
	unsigned int before = told->opaque;

	if (!mpsd_line_tell(atomic_load(&line), generation, told))
		return false;
	if (told->opaque != before)
		end_standby();
	return true;
}

static bool give_room(void)
{
	const char *why = mpsd_room_wanted();
	bool goes = why && atomic_load(&ready), is = !goes || say_unready(why, true);

	if (why)
		mpsd_room_is_given(goes);
	return is && mpsd_room_tell(atomic_load(&line));
}

static bool follow(struct mpsd_told *told)
{
	const char *why = NULL;
	uint64_t count;

	if (read(atomic_load(&wake), &count, sizeof(count)) < 0 && errno != EAGAIN)
		return false;
	atomic_store(&woken, false);
	if (!tell(told) || !mpsd_line_tell_error(atomic_load(&line), generation) || !give_room() || !follow_budgets())
		return false;
	return !atomic_load(&ready) || mpsd_standby_follow(&why) || say_unready(why, false);
}

/* Not while the process ends, which waits for this. */
static bool act(int fd, bool said, bool was_woken, struct mpsd_told *told)
{
	struct mpsd_failover_message message;
	bool is = true;

	pthread_mutex_lock(&busy);
	if (atomic_load(&off) || !mpsd_turn_follow(fd))
		is = false;
	else if (said)
		is = recv(fd, &message, sizeof(message), 0) == (ssize_t)sizeof(message) && obey(&message);
	else if (was_woken)
		is = follow(told);
	else
		is = follow_budgets();
	pthread_mutex_unlock(&busy);
	return is;
}

static int soonest(int one, int other)
{
	return one < 0 || (other >= 0 && other < one) ? other : one;
}

/* Until the connection ends. */
static void listen_to(int fd)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_HELLO, home, NULL);
	struct pollfd polled[2] = { { .fd = fd, .events = POLLIN },
				    { .fd = atomic_load(&wake), .events = POLLIN } };
	struct mpsd_told told = { 0, 0 };

	message.mode = mode;
	message.values[0] = MPSD_FAILOVER_TAKES_FENCED | MPSD_FAILOVER_GIVES | MPSD_FAILOVER_BUDGETS | MPSD_FAILOVER_SWITCHES;
	if (!say(&message) || !tell(&told))
		return;
	while (!atomic_load(&off) && mpsd_left_tell(true)) {
		int due = soonest(soonest(mpsd_due_ms(), mpsd_budgets_due_ms()), mpsd_rescue_due_ms(fd));

		if (poll(polled, 2, due) < 0 && errno != EINTR)
			return;
		if (!mpsd_turn_left_ms() && !have_turn(false))
			return;
		pthread_mutex_lock(&busy);
		mpsd_move_tend();
		pthread_mutex_unlock(&busy);
		if (!act(fd, polled[0].revents != 0, polled[1].revents != 0, &told))
			return;
		pthread_mutex_lock(&busy);
		/* Whether the daemon has read of the loss shows only when that was told. */
		if (!atomic_load(&woken))
			rescue_if_due(fd);
		pthread_mutex_unlock(&busy);
	}
}

static void cut_off(void)
{
	pthread_mutex_lock(&busy);
	mpsd_turn_cut_off();
	if (!atomic_load(&off))
		go_on_alone();
	pthread_mutex_unlock(&busy);
}

/* Its context is lost, or it holds its calls for a turn. */
static bool stands_still(void)
{
	return mpsd_rescue_due_ms(-1) >= 0 || mpsd_turn_is_due();
}

/*
 * Wait before the next attempt to connect. Messages of the program's threads go to the next daemon. A program that stands
 * still tries often.
 */
static void wait_without_line(int pause_ms)
{
	uint64_t began = mpsd_now_ns(), until = began + (uint64_t)pause_ms * 1000000, now;
	struct pollfd polled = { .fd = atomic_load(&wake), .events = POLLIN };
	uint64_t count;

	while (!atomic_load(&off) && (now = mpsd_now_ns()) < until) {
		int left_ms = (int)((until - now) / 1000000) + 1;

		if (left_ms > FIRST_PAUSE_MS && stands_still()) {
			if (now - began >= FIRST_PAUSE_MS * 1000000ull)
				return;
			left_ms = FIRST_PAUSE_MS;
		}
		if (poll(&polled, 1, soonest(left_ms, soonest(mpsd_turn_left_ms(), mpsd_rescue_due_ms(-1)))) > 0 &&
		    read(polled.fd, &count, sizeof(count)) > 0)
			atomic_store(&woken, false);
		pthread_mutex_lock(&busy);
		if (!atomic_load(&off) && !mpsd_turn_left_ms())
			have_turn(false);
		rescue_if_due(-1);
		pthread_mutex_unlock(&busy);
	}
}

/* The daemon may come back at any time, and knows then by whom it is asked. A standby stays meanwhile. */
static void *run(void *unused)
{
	int pause_ms = FIRST_PAUSE_MS, ended = 0;

	(void)unused;
	/*
	 * A daemon may end again and again soon after its start. Give up only on one that closes connections without a
	 * welcome, and only without a standby context: with one the program moves there by itself.
	 */
	while (!atomic_load(&off) && (ended < LAST_TRIES || atomic_load(&ready)) && mode != MPSD_FAILOVER_OFF) {
		uint64_t began = mpsd_now_ns();
		int fd = mpsd_connect(mpsd_wish()->path, SEND_S, 0);
		bool is_short;

		if (fd >= 0) {
			welcomed = false;
			atomic_store(&line, fd);
			mpsd_rescue_connected();
			/* Threads that hold an error back wait anew: this daemon has its own time to answer. */
			mpsd_phase_wake();
			mpsd_line_wake();
			listen_to(fd);
			if (atomic_exchange(&line, -1) == fd)
				close(fd);
			cut_off();
			mpsd_room_may_ask(false);
			mpsd_left_may_tell(-1);
			mpsd_budgets_line_ended();
			is_short = mpsd_now_ns() - began < SHORT_NS;
			ended = welcomed || !is_short ? 0 : ended + 1;
			if (!is_short)
				pause_ms = FIRST_PAUSE_MS;
			else if (welcomed && pause_ms > AGAIN_PAUSE_MS)
				pause_ms = AGAIN_PAUSE_MS;
		}
		wait_without_line(pause_ms);
		pause_ms = pause_ms * 2 < LAST_PAUSE_MS ? pause_ms * 2 : LAST_PAUSE_MS;
	}
	mpsd_exact_stop("no daemon offers fail-over");
	return NULL;
}

static void in_child(void)
{
	int fd = atomic_exchange(&line, -1), other = atomic_exchange(&wake, -1);

	atomic_store(&off, true);
	busy = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	mpsd_phase_child();
	mpsd_exact_child();
	mpsd_release_child();
	mpsd_captures_child();
	mpsd_kept_child();
	mpsd_room_child();
	if (fd >= 0)
		close(fd);
	if (other >= 0)
		close(other);
}

/* What a copy has registered for the end comes after this, if this was registered after it. */
static void at_end(void)
{
	struct timespec until = mpsd_in(END_MS);

	/* First, for the mode ends with the line. */
	mpsd_exact_at_end(!atomic_load(&off));
	atomic_store(&off, true);
	mpsd_fence_leave_off();
	mpsd_line_wake();
	mpsd_room_at_end();
	mpsd_release_at_end();
	if (!pthread_mutex_timedlock(&busy, &until))
		pthread_mutex_unlock(&busy);
	mpsd_fence_at_end();
}

void mpsd_line_ends_first(void)
{
	atexit(at_end);
}

static void start(void)
{
	if (!mpsd_line_offered())
		return;
	mode = mpsd_wish()->mode;
	/* Before there is a thread that may be told otherwise. */
	(mode == MPSD_FAILOVER_EXACT ? mpsd_exact_start : mpsd_carry_plainly)();
	atomic_store(&wake, eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	if (atomic_load(&wake) < 0 || !mpsd_thread_start(run, NULL)) {
		mpsd_exact_stop("no thread for fail-over");
		mpsd_say("fail-over disabled: cannot create a thread; raise TasksMax or ulimit -u");
		return;
	}
	pthread_atfork(NULL, NULL, in_child);
	mpsd_line_ends_first();
}

void mpsd_line_start(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start);
}

// SPDX-License-Identifier: MIT
#include "failover/budgets.h"

#include "exact/chunks.h"
#include "exact/exposure.h"
#include "exact/leave.h"
#include "exact/limit.h"
#include "exact/spending.h"
#include "exact/undo.h"
#include "failover/line.h"

/* By the thread of line.c: the connection for budgets, and that for LEAVES after GUARD. -1: the daemon does not know them. */
static int told_line = -1, ordered_line = -1;
static struct {
	uint64_t held, wanted;
	bool has_left, hears_exposed;
	const char *exposed;	/* NULL: it is not */
	bool has_limit;		/* since WELCOME; until then a wish may have met no limit, and has no answer */
} told;

void mpsd_budgets_welcome(int line, const struct mpsd_failover_message *welcome)
{
	bool is = (welcome->values[4] & MPSD_FAILOVER_HEARS_BUDGETS) != 0;

	told_line = is ? line : -1;
	ordered_line = welcome->values[1] & MPSD_FAILOVER_SWITCH_KNOWN ? line : -1;
	told = (__typeof__(told)){ .hears_exposed = (welcome->values[4] & MPSD_FAILOVER_HEARS_EXPOSED) != 0 };
	mpsd_spending_budget(is ? welcome->values[5] : 0, is);
	mpsd_limit_answers(is);
	if (!is)
		mpsd_limit_told(MPSD_NO_LIMIT, 0);
}

/* Limit and budget stay as they were: the daemon comes back. */
void mpsd_budgets_line_ended(void)
{
	told_line = ordered_line = -1;
	mpsd_limit_answers(false);
}

void mpsd_budgets_limit(const struct mpsd_failover_message *limit)
{
	if (told_line < 0)
		return;
	if (!told.has_limit || limit->values[1] == told.wanted)
		told.wanted = 0;
	told.has_limit = true;
	mpsd_limit_told(limit->values[0], limit->values[1]);
}

/* Of a program that has left. -1: the daemon does not know that reason. */
static int line_of_leaving(void)
{
	return mpsd_leave_why()->budget == MPSD_FAILOVER_BUDGET_BY_HAND ? ordered_line : told_line;
}

static bool tell_leaving(void)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_LEAVES, 0, NULL);
	const struct mpsd_leaving *why = mpsd_leave_why();

	if (told.has_left || !mpsd_leave_has() || line_of_leaving() < 0)
		return true;
	told.has_left = true;
	message.values[0] = (uint64_t)why->budget;
	for (unsigned int i = 0; i < sizeof(why->values) / sizeof(*why->values); i++)
		message.values[1 + i] = why->values[i];
	message.values[4] = why->may_come_back;
	mpsd_leave_text(message.text, sizeof(message.text));
	return mpsd_line_say(line_of_leaving(), &message);
}

static bool tell_held(void)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_HOLDS, 0, NULL);
	uint64_t held = mpsd_undo_bytes(), wanted = mpsd_leave_has() ? 0 : mpsd_limit_wanted();

	if (held == told.held && (!wanted || wanted == told.wanted))
		return true;
	told.held = message.values[0] = held;
	told.wanted = message.values[1] = wanted;
	return mpsd_line_say(told_line, &message);
}

static bool tell_cost(void)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_COST, 0, NULL);
	struct mpsd_cost cost;

	if (!mpsd_spending_take(&cost))
		return true;
	message.values[0] = cost.bytes_each;
	message.values[1] = cost.added_ns;
	message.values[2] = cost.rest_ns;
	return mpsd_line_say(told_line, &message);
}

static bool tell_exposure(void)
{
	struct mpsd_failover_message message;
	const char *why = mpsd_leave_has() ? NULL : mpsd_exposure_why();

	if (!told.hears_exposed || why == told.exposed)
		return true;
	message = mpsd_line_message(MPSD_FAILOVER_EXPOSED, 0, why);
	message.values[0] = why != NULL;
	told.exposed = why;
	return mpsd_line_say(told_line, &message);
}

bool mpsd_budgets_tell(void)
{
	mpsd_chunks_tend();
	return (told_line < 0 || tell_cost()) && tell_leaving() && (told_line < 0 || (tell_exposure() && tell_held()));
}

int mpsd_budgets_due_ms(void)
{
	int exposed = told_line >= 0 && told.exposed ? mpsd_exposure_left_ms() : -1, window = mpsd_chunks_due_ms();

	return window < 0 || (exposed >= 0 && exposed < window) ? exposed : window;
}

bool mpsd_budgets_refuse(int line, uint64_t generation)
{
	char text[MPSD_FAILOVER_TEXT_ROOM];

	mpsd_leave_text(text, sizeof(text));
	return line_of_leaving() >= 0 || mpsd_line_tell_unready(line, generation, text, false);
}

// SPDX-License-Identifier: MIT
/*
 * Where the parameters of launches lead: what a kernel may write is taken to be every allocation that they point into.
 * Addresses lie at multiples of 8. What validation has seen them read alone may be still (still.h).
 *
 * Pointers that a kernel finds in memory are not seen (MPSD_FAILOVER=validate names kernels that follow any).
 */
#include <string.h>

#include "exact/named.h"
#include "exact/params.h"
#include "exact/readers.h"
#include "exact/still.h"
#include "exact/validate.h"
#include "window.h"

bool mpsd_launch_records_event(const struct mpsd_op *op)
{
	CUlaunchConfig config = op->launch.config;

	config.attrs = op->launch.attributes;
	return mpsd_config_records_event(&config);
}

/* The words of a launch's parameters that may be addresses: nearly all of hundreds are numbers. */
struct words {
	const struct mpsd_op *op;
	const struct mpsd_bounds windows, pins, variables;
	size_t at;
};

/* `variables`: those of modules are looked for, too. */
static struct words words_of(const struct mpsd_op *op, struct mpsd_bounds variables)
{
	return (struct words){ op, mpsd_span_bounds(&mpsd_windows_span), mpsd_span_bounds(&mpsd_pins_span), variables, 0 };
}

static struct words memory_of(const struct mpsd_op *op)
{
	return words_of(op, (struct mpsd_bounds){ 0, 0 });
}

static inline bool next_word(struct words *words, CUdeviceptr *word)
{
	for (; words->at + sizeof(*word) <= words->op->launch.bytes; words->at += sizeof(*word)) {
		memcpy(word, words->op->launch.buffer + words->at, sizeof(*word));
		if (mpsd_bounds_may_hold(words->windows, *word) || mpsd_bounds_may_hold(words->pins, *word) ||
		    mpsd_bounds_may_hold(words->variables, *word)) {
			words->at += sizeof(*word);
			return true;
		}
	}
	return false;
}

/* Of the word that was found last. Validation is to see what is saved for all. */
static bool is_read(const struct words *words)
{
	return mpsd_reader_is(words->op->launch.reader, words->at - sizeof(CUdeviceptr)) && !mpsd_validates();
}

/* With the lock. */
static bool is_done(const struct words *words, CUdeviceptr word)
{
	if (!mpsd_bounds_may_hold(words->windows, word))
		return true;
	if (is_read(words))
		return mpsd_stamps_is_whole_now(word) || mpsd_still_rely(word);
	if (mpsd_readers_any)
		mpsd_still_written_now(word);
	return mpsd_stamps_is_whole_now(word);
}

/* With the lock: one by one, whatever they are. */
static MPSD_SELDOM bool are_all_done(const struct mpsd_op *op)
{
	struct words words = words_of(op, mpsd_span_bounds(&mpsd_variables_span));
	CUdeviceptr word;

	while (next_word(&words, &word))
		if (mpsd_bounds_may_hold(words.variables, word) || !is_done(&words, word) ||
		    (mpsd_bounds_may_hold(words.pins, word) && mpsd_is_pinned((const void *)word)))
			return false;
	return true;
}

/*
 * Nearly always each word is a number, or leads to what is whole. So all are looked at with no branch between: after what the
 * program has done since its last launch the processor foresees none, and each takes as long as a dozen words.
 */
MPSD_OF_A_LAUNCH bool mpsd_params_are_whole(const struct mpsd_op *op)
{
	const struct mpsd_bounds windows = mpsd_span_bounds(&mpsd_windows_span), pins = mpsd_span_bounds(&mpsd_pins_span),
				 variables = mpsd_span_bounds(&mpsd_variables_span);
	const struct mpsd_wholes wholes = mpsd_stamps_wholes();
	const char *word = op->launch.buffer, *end = word + op->launch.bytes / sizeof(CUdeviceptr) * sizeof(CUdeviceptr);
	bool others = mpsd_readers_any || !wholes.pages;

	if (__builtin_expect(others, 0))
		return are_all_done(op);
	for (; word < end; word += sizeof(CUdeviceptr)) {
		CUdeviceptr address;
		uint64_t page;
		bool is_page;

		memcpy(&address, word, sizeof(address));
		page = (address - wholes.base) / MPSD_EXACT_PAGE;
		is_page = page < wholes.pages;
		page = is_page ? page : 0;
		is_page &= atomic_load_explicit(&wholes.wholes[page], memory_order_relaxed) == wholes.now;
		others |= (mpsd_bounds_may_hold(windows, address) & !is_page) | mpsd_bounds_may_hold(pins, address) |
			  mpsd_bounds_may_hold(variables, address);
	}
	return __builtin_expect(!others, 1) || are_all_done(op);
}

static bool is_still(const struct words *words, CUdeviceptr word)
{
	bool is;

	if (!is_read(words))
		return false;
	mpsd_word_take(&mpsd_exact_lock);
	is = !mpsd_is_left() && mpsd_still_rely(word);
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

static bool is_left_out(const struct mpsd_plan *plan)
{
	return (plan->part == MPSD_PLAN_READS && !plan->reads) || (plan->part == MPSD_PLAN_WRITES && plan->reads);
}

CUresult mpsd_params_save(const struct mpsd_op *op, struct mpsd_plan *plan)
{
	struct words words = memory_of(op);
	CUdeviceptr word;

	mpsd_named_look(op->launch.function);
	/* Nothing of this library's proves what is before it. */
	if (mpsd_launch_records_event(op))
		mpsd_epoch_unsure("a launch that records an event");
	while (next_word(&words, &word)) {
		CUresult result = CUDA_SUCCESS;

		plan->reads = is_read(&words);
		if (!is_left_out(plan) && !is_still(&words, word))
			result = mpsd_undo_save_around(plan, word);
		plan->reads = false;
		if (result != CUDA_SUCCESS)
			return result;
		if (mpsd_is_pinned((const void *)word))
			mpsd_epoch_unsure(mpsd_params_why_pinned(op->launch.function));
	}
	return CUDA_SUCCESS;
}

CUresult mpsd_params_learn(const struct mpsd_op *op, void *is_changed)
{
	bool (*has_changed)(struct mpsd_pages pages) = *(bool (**)(struct mpsd_pages pages))is_changed;
	struct words words = memory_of(op);
	struct mpsd_allocation found;
	CUdeviceptr word;

	while (op->kind == MPSD_OP_LAUNCH && op->launch.reader && next_word(&words, &word))
		if (mpsd_undo_find_around(word, &found) && mpsd_stamps_hold(found.base))
			mpsd_reader_saw(op->launch.reader, words.at - sizeof(word),
					has_changed(mpsd_stamps_pages(found.base, found.size)));
	return CUDA_SUCCESS;
}

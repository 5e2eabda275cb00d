// SPDX-License-Identifier: MIT
/*
 * The parameters of launches: copied, for a launch that is done again.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exact/named.h"
#include "exact/params.h"
#include "exact/readers.h"
#include "exact/shelf.h"
#include "exact/stamps.h"
#include "failover/line.h"
#include "failover/made.h"
#include "window.h"

#define FUNCTIONS (MPSD_PLACES / 2)
#define FEW 6u
#define FEW_BYTES 64u
#define MOST_PARAMETERS 512u
#define MOST_BYTES 32768u	/* 32,764 by the CUDA programming guide, from compute capability 7.0 on */

struct place {
	uint16_t offset, size;
};

_Static_assert(MOST_BYTES <= UINT16_MAX, "that is enough for it");

/* What is seldom looked at. */
struct rest {
	struct mpsd_reader *reader;
	char *pinned;			/* said once its parameters led to pinned memory */
};

/*
 * What the driver says of a function's parameters. Between two launches a program has used all of the processor's nearer
 * memory for something else: of most functions one line of that is fetched.
 */
static struct info {
	CUfunction function;		/* NULL: there is none here */
	uint32_t filled;		/* bytes of the parameters, */
	uint16_t bytes, count;		/* with what lies between them; how many there are */
	struct place few[FEW];
	uint32_t accepted[MPSD_SHAPES];	/* what shapes.c keeps of it */
	struct place *more;		/* in place of those; NULL: there are no more */
	struct rest *rest;		/* NULL: nothing */
} infos[MPSD_PLACES] __attribute__((aligned(64)));	/* under the lock, like all that follows; each near where it is looked for */

_Static_assert(sizeof(struct info) == 64, "a function has one line of the processor's cache");

static unsigned int known;		/* of infos */

static bool is_kernel(CUfunction function)
{
	return mpsd_made_is(function, MPSD_MADE_KERNEL);
}

static bool can_ask(bool kernel)
{
	return mpsd_tables()->real[kernel ? MPSD_cuKernelGetParamInfo : MPSD_cuFuncGetParamInfo] != NULL;
}

/* NOT_SUPPORTED: nobody knows. Anything else is the driver's. */
static CUresult ask(CUfunction function, struct place *places, uint32_t *count)
{
	bool kernel = is_kernel(function);

	if (!kernel && !mpsd_made_learn(function))
		mpsd_line_opaque("a function from an untracked API call");
	if (!can_ask(kernel))
		return CUDA_ERROR_NOT_SUPPORTED;
	for (*count = 0; *count < MOST_PARAMETERS; ++*count) {
		size_t offset = 0, size = 0;
		CUresult result;

		result = kernel ? real_cuKernelGetParamInfo(mpsd_native((CUkernel)function), *count, &offset, &size)
				: real_cuFuncGetParamInfo(mpsd_native(function), *count, &offset, &size);
		if (result == CUDA_ERROR_INVALID_VALUE)
			return CUDA_SUCCESS;
		if (result != CUDA_SUCCESS)
			return result;
		if (offset + size > MOST_BYTES)
			return CUDA_ERROR_NOT_SUPPORTED;
		places[*count] = (struct place){ (uint16_t)offset, (uint16_t)size };
	}
	return CUDA_ERROR_NOT_SUPPORTED;
}

static uint32_t first_place_of(CUfunction function)
{
	return (uint32_t)(((uintptr_t)function >> 3) * 0x9e3779b97f4a7c15ull >> 51);
}

MPSD_OF_A_LAUNCH void mpsd_params_fetch(CUfunction function)
{
	if (mpsd_exact())
		__builtin_prefetch(&infos[first_place_of(function)]);
}

/* Under the lock. Where it is, or would be. */
static struct info *place_of(CUfunction function)
{
	uint32_t at = first_place_of(function);

	while (__builtin_expect(infos[at].function != function, 0) && infos[at].function)
		at = (at + 1) % MPSD_PLACES;
	return &infos[at];
}

/* Under the lock. NULL: it is not known. */
static struct info *info_of(CUfunction function)
{
	struct info *info = place_of(function);

	return info->function ? info : NULL;
}

static const struct place *places_in(const struct info *info)
{
	return info->more ? info->more : info->few;
}

static uint16_t end_of(const struct place *places, uint32_t count)
{
	uint16_t end = 0;

	for (uint32_t i = 0; i < count; i++)
		if (places[i].offset + places[i].size > end)
			end = (uint16_t)(places[i].offset + places[i].size);
	return end;
}

/* Under the lock. NULL: no memory. */
static struct rest *rest_of(struct info *info)
{
	if (!info->rest)
		info->rest = calloc(1, sizeof(*info->rest));
	return info->rest;
}

/* Under the lock. */
static CUresult keep(CUfunction function, const struct place *places, uint32_t count, struct mpsd_reader *reader)
{
	struct info *info = place_of(function);
	struct place *more = NULL;

	if (info->function)
		return CUDA_SUCCESS;
	if (known == FUNCTIONS)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (count > FEW && !(more = malloc(count * sizeof(*more))))
		return CUDA_ERROR_OUT_OF_MEMORY;
	*info = (struct info){ .function = function, .count = (uint16_t)count, .more = more };
	memcpy(more ? more : info->few, places, count * sizeof(*places));
	info->bytes = end_of(places, count);
	for (uint32_t i = 0; i < count; i++)
		info->filled += places[i].size;
	if (reader && rest_of(info))
		info->rest->reader = reader;
	known++;
	return CUDA_SUCCESS;
}

/* Without the lock: the driver may load the function for this, and a lost context may keep the thread. */
static CUresult learn(const struct mpsd_launch *given)
{
	CUfunction function = given->function;
	struct place places[MOST_PARAMETERS];
	struct mpsd_reader *reader;
	uint32_t count = 0;
	CUresult result = ask(function, places, &count);

	if (result != CUDA_SUCCESS)
		return result;
	reader = mpsd_reader_of(function, is_kernel(function), places, count * sizeof(*places), end_of(places, count));
	/* In a copy that was left it is no function, and to have no more parameters looks the same. */
	if (mpsd_is_left())
		return MPSD_AGAIN;
	mpsd_word_take(&mpsd_exact_lock);
	result = keep(function, places, count, reader);
	/* What is captured is not launched. */
	mpsd_newest_note(first_place_of(function), given->is_brief);
	mpsd_word_give(&mpsd_exact_lock);
	return result;
}

void mpsd_params_forget(void)
{
	mpsd_word_take(&mpsd_exact_lock);
	/* What was said of pinned memory stays. */
	for (struct info *info = infos; known && info < infos + MPSD_PLACES; info++) {
		if (!info->function)
			continue;
		free(info->more);
		free(info->rest);
		*info = (struct info){ .function = NULL };
		known--;
	}
	mpsd_word_give(&mpsd_exact_lock);
}

#define BUFFER_ALIGNMENT 16

_Static_assert(sizeof(struct mpsd_op) % _Alignof(CUlaunchAttribute) == 0, "attributes lie behind the operation");
_Static_assert(sizeof(CUlaunchAttribute) % sizeof(void *) == 0, "pointers lie behind the attributes");

/*
 * Under the lock. In one block: the operation, its attributes, where each parameter is, and the parameters, with nothing
 * between them.
 */
MPSD_OF_A_LAUNCH static inline struct mpsd_op *make(const struct mpsd_launch *given, uint32_t count, size_t bytes)
{
	unsigned int attributes = given->config->numAttrs;
	size_t before = sizeof(struct mpsd_op) + attributes * sizeof(CUlaunchAttribute) + count * sizeof(void *);
	struct mpsd_shelf *shelf = NULL;
	CUlaunchAttribute *copies;
	struct mpsd_op *op;

	before = (before + BUFFER_ALIGNMENT - 1) / BUFFER_ALIGNMENT * BUFFER_ALIGNMENT;
	op = __builtin_expect(given->is_brief, 1) ? mpsd_shelf_take(before + bytes, &shelf) : NULL;
	if (__builtin_expect(!op, 0) && !(op = malloc(before + bytes)))
		return NULL;
	copies = (CUlaunchAttribute *)(op + 1);
	memset(op, 0, offsetof(struct mpsd_op, launch));
	op->kind = MPSD_OP_LAUNCH;
	op->is_brief = given->is_brief;
	op->stream = given->stream;
	op->shelf = shelf;
	op->launch.function = given->function;
	op->launch.config = *given->config;
	op->launch.attributes = copies;
	op->launch.is_plain = given->is_plain;
	op->launch.is_cooperative = given->is_cooperative;
	op->launch.is_buffer = false;
	op->launch.count = count;
	op->launch.bytes = bytes;
	op->launch.parameters = (void **)(copies + attributes);
	op->launch.buffer = (char *)op + before;
	op->launch.reader = NULL;
	if (__builtin_expect(attributes != 0, 0))
		memcpy(copies, given->config->attrs, attributes * sizeof(*copies));
	return op;
}

/* Most of these are numbers and a few addresses, which need no call to be copied. */
static void copy_other(char *to, const char *from, size_t size)
{
	if (size == sizeof(uint32_t)) {
		memcpy(to, from, sizeof(uint32_t));
	} else if (size % sizeof(uint64_t) || size > FEW_BYTES) {
		memcpy(to, from, size);
	} else {
		for (size_t at = 0; at < size; at += sizeof(uint64_t))
			memcpy(to + at, from + at, sizeof(uint64_t));
	}
}

/* Under the lock. */
MPSD_OF_A_LAUNCH static struct mpsd_op *copy_each(const struct mpsd_launch *given, const struct info *info, void **parameters)
{
	struct mpsd_op *op = make(given, info->count, info->bytes);
	const struct place *place = places_in(info);
	void **to;
	char *buffer;

	if (__builtin_expect(!op, 0))
		return NULL;
	to = op->launch.parameters;
	buffer = op->launch.buffer;
	/* What lies between them would be taken for an address, or be another one each time. */
	if (__builtin_expect(info->filled != info->bytes, 0))
		memset(buffer, 0, info->bytes);
	for (void **end = to + info->count; to < end; to++, parameters++, place++) {
		char *one = buffer + place->offset;

		*to = one;
		/* Most are addresses. */
		if (__builtin_expect(place->size == sizeof(CUdeviceptr), 1)) {
			CUdeviceptr address;

			memcpy(&address, *parameters, sizeof(address));
			memcpy(one, &address, sizeof(address));
			__builtin_prefetch(mpsd_stamps_of(address));
		} else {
			copy_other(one, *parameters, place->size);
		}
	}
	if (info->rest)
		op->launch.reader = info->rest->reader;
	return op;
}

uint32_t *mpsd_params_accepted(CUfunction function)
{
	struct info *info = info_of(function);

	return info ? info->accepted : NULL;
}

MPSD_OF_A_LAUNCH struct mpsd_op *mpsd_params_take_known(const struct mpsd_launch *given, void **parameters)
{
	const struct info *info = info_of(given->function);

	return info && (parameters || !info->count) ? copy_each(given, info, parameters) : NULL;
}

static MPSD_SELDOM CUresult take_each(const struct mpsd_launch *given, void **parameters, struct mpsd_op **op)
{
	CUresult result = CUDA_SUCCESS;
	bool is_known = false;

	/* All may be forgotten again, when another thread unloads a module. */
	while (result == CUDA_SUCCESS && !is_known) {
		const struct info *info;

		mpsd_word_take(&mpsd_exact_lock);
		info = info_of(given->function);
		is_known = info != NULL;
		if (is_known && info->count && !parameters)
			result = CUDA_ERROR_INVALID_VALUE;
		else if (is_known && !(*op = copy_each(given, info, parameters)))
			result = CUDA_ERROR_OUT_OF_MEMORY;
		mpsd_word_give(&mpsd_exact_lock);
		if (!is_known)
			result = learn(given);
	}
	return result;
}

/* cuda.h: CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE, each followed by its value, until _END. */
static MPSD_SELDOM CUresult take_buffer(const struct mpsd_launch *given, void **extra, struct mpsd_op **op)
{
	const void *from = NULL;
	size_t size = 0;

	for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
		if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
			from = extra[1];
		else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE)
			size = *(const size_t *)extra[1];
		else
			return CUDA_ERROR_NOT_SUPPORTED;
	}
	if (size > MOST_BYTES || (size && !from))
		return CUDA_ERROR_NOT_SUPPORTED;
	mpsd_word_take(&mpsd_exact_lock);
	*op = make(given, 0, size);
	mpsd_word_give(&mpsd_exact_lock);
	if (!*op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	(*op)->launch.is_buffer = true;
	if (size)
		memcpy((*op)->launch.buffer, from, size);
	return CUDA_SUCCESS;
}

CUresult mpsd_params_take(const struct mpsd_launch *given, void **parameters, void **extra, struct mpsd_op **op)
{
	CUresult result;

	if (!given->function)
		return CUDA_ERROR_INVALID_HANDLE;
	result = extra ? take_buffer(given, extra, op) : take_each(given, parameters, op);

	if (result == CUDA_SUCCESS)
		mpsd_params_follow_variables(*op);
	return result;
}

/* Behind those that the launch has, or in place of the one of that kind. */
static unsigned int put_attribute(CUlaunchAttribute *attributes, unsigned int count, CUlaunchAttributeID id,
				  const CUlaunchAttributeValue *value)
{
	unsigned int i = 0;

	while (i < count && attributes[i].id != id)
		i++;
	attributes[i] = (CUlaunchAttribute){ .id = id, .value = *value };
	return i == count ? count + 1 : count;
}

/* What is not brief lies on no shelf, so the lock is not needed. NULL: no memory. */
static struct mpsd_op *copy_with(const struct mpsd_op *op, const CUlaunchConfig *config)
{
	const struct mpsd_launch launch = { op->launch.function, op->stream, config, op->launch.is_plain,
					    op->launch.is_cooperative, false };
	struct mpsd_op *made = make(&launch, op->launch.count, op->launch.bytes);

	if (!made)
		return NULL;
	memcpy(made->launch.buffer, op->launch.buffer, op->launch.bytes);
	for (unsigned int i = 0; i < op->launch.count; i++)
		made->launch.parameters[i] = made->launch.buffer + ((char *)op->launch.parameters[i] - op->launch.buffer);
	made->launch.is_buffer = op->launch.is_buffer;
	made->launch.reader = op->launch.reader;
	return made;
}

struct mpsd_op *mpsd_params_copy(const struct mpsd_op *op)
{
	CUlaunchConfig config = op->launch.config;

	config.attrs = op->launch.attributes;
	return copy_with(op, &config);
}

struct mpsd_op *mpsd_params_with(const struct mpsd_op *op, CUlaunchAttributeID id, const CUlaunchAttributeValue *value)
{
	static const CUlaunchAttributeValue cooperative = { .cooperative = 1 };
	CUlaunchConfig config = op->launch.config;
	CUlaunchAttribute *attributes = malloc((config.numAttrs + 2) * sizeof(*attributes));
	struct mpsd_op *made;

	if (!attributes)
		return NULL;
	memcpy(attributes, op->launch.attributes, config.numAttrs * sizeof(*attributes));
	/* The call that says so by its name takes no attributes. */
	if (op->launch.is_cooperative)
		config.numAttrs = put_attribute(attributes, config.numAttrs, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &cooperative);
	config.numAttrs = put_attribute(attributes, config.numAttrs, id, value);
	config.attrs = attributes;
	made = copy_with(op, &config);
	if (made)
		made->launch.is_plain = made->launch.is_cooperative = false;
	free(attributes);
	return made;
}

#define PINNED "a kernel that may write pinned host memory"

/* What is said stays. */
const char *mpsd_params_why_pinned(CUfunction function)
{
	const char *name = mpsd_name_of_function(function), *said = PINNED;
	struct info *info;
	struct rest *rest;

	if (!name)
		return said;
	mpsd_word_take(&mpsd_exact_lock);
	info = info_of(function);
	rest = info ? rest_of(info) : NULL;
	if (rest && !rest->pinned && asprintf(&rest->pinned, PINNED ": %.120s", name) < 0)
		rest->pinned = NULL;
	if (rest && rest->pinned)
		said = rest->pinned;
	mpsd_word_give(&mpsd_exact_lock);
	return said;
}

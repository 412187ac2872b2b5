/* Has threads replay records, switch, step, hand a parent over, and take at once; then every byte that was delivered has
 * been counted, and no parent was ever half of one and half of another.
 * To be built with a sanitizer. Argument: the library of mock_cupti.c.
 */

#define _GNU_SOURCE

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int ks_open(const char *);
int ks_on(uint32_t);
int ks_pause(void);
int ks_flush(void);
int ks_off(void);
int ks_keep(uint32_t);
int ks_take(void *, uint32_t, void *, uint32_t, void *, uint32_t, void *);
const char *ks_error(void);
int ks_arm(uint32_t);
int ks_step_error(char *, uint32_t);
int ks_context(void *);
void dd_training_step_begin(void);
void dd_training_step_end(void);
void dd_set_global_parent_context(uint64_t, uint64_t, uint64_t, bool, int, const char *const *, const char *const *,
                                  size_t);
void dd_clear_global_parent_context(void);
uint32_t ks_limits(uint32_t *, uint32_t);

#define KERNEL 208 /* bytes of a record */
#define CELLS 10
#define RECORDS 400
#define REPLAYERS 3
#define ENOUGH 60000u /* records */
#define FORKED 6

/* As in ddtrace_pytorch/kernels/sampler_library.py. */
enum { COUNTED, NAMES = 3, RAWS = 5, LEFT_OUT, DROPPED = 10, LATE_BYTES = 20, STRAYS, HELD = 23, STEPS, TOTALS };
enum {
    ROW_SIZE, RAW_SIZE, TOTALS_SIZE, ROWS, NAME_BYTES, RAWS_AT_MOST, BUCKETS, REASONS,
    CONTEXT_SIZE = 12, TAGS, TAG_NAME, TAG_VALUE, LIMITS
};

typedef struct {
    uint64_t trace_lo, trace_hi, span;
    uint32_t has_priority;
    int32_t priority;
    uint64_t many, left_out;
    char tags[16][64 + 256];
} Context;

static uint32_t limits[LIMITS];
static void (*replay)(const uint64_t *, uint64_t, uint64_t), (*hold)(bool), (*deliver)(void);
static uint64_t (*delivered)(void), (*faults)(void);
static atomic_bool done;
static uint64_t counted, dropped, late, held;
static atomic_ulong takes, armed, parents, steps_taken;

static void check(bool right, const char *what)
{
    if (!right) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void *replaying(void *number)
{
    static char names[REPLAYERS][RECORDS][64];
    static uint64_t cells[REPLAYERS][RECORDS][CELLS];
    uint64_t thread = (uintptr_t)number;
    for (uint64_t i = 0; i < RECORDS; i++)
        snprintf(names[thread][i], sizeof names[thread][i], "kernel_%d_of_some_length", (int)(i % 97));
    while (!atomic_load(&done)) {
        uint64_t at = now();
        for (uint64_t i = 0; i < RECORDS; i++) {
            uint64_t *one = cells[thread][i];
            memset(one, 0, sizeof cells[thread][i]);
            one[0] = 10;
            one[1] = i % 50 == 1 ? 0 : at - 1000;
            one[2] = i % 50 == 2 ? at - 2000 : at;
            one[4] = i % 5;
            one[6] = i % 50 == 3 ? 0 : (uintptr_t)names[thread][i];
        }
        replay(cells[thread][0], RECORDS, 40);
    }
    return NULL;
}

static void *switching(void *unused)
{
    unsigned seed = 1;
    while (!atomic_load(&done)) {
        int what = rand_r(&seed) % 8;
        hold(what == 0);
        int result = what < 3 ? ks_on((uint32_t)what) : what < 5 ? ks_flush() : what < 6 ? ks_pause() : ks_off();
        check(result == 0, ks_error());
        if (what % 2)
            usleep(1); /* the lock is given to whoever asks first, not to who waits longest */
    }
    return unused;
}

static void *stepping(void *unused)
{
    unsigned seed = 2;
    while (!atomic_load(&done)) {
        int what = rand_r(&seed) % 8;
        if (what < 4) {
            check(ks_arm((uint32_t)what) == 0, ks_error());
            atomic_fetch_add(&armed, 1);
        }
        dd_training_step_begin();
        if (what % 2)
            usleep((useconds_t)what);
        dd_training_step_end();
        char why[512];
        check(ks_step_error(why, sizeof why) == 0, why);
    }
    return unused;
}

/* Each parent says one number everywhere. */
static void *handing_over(void *unused)
{
    for (uint64_t i = 1; !atomic_load(&done); i++) {
        char text[32];
        const char *names[] = {"rank", "service", text}, *values[] = {text, text, text};
        snprintf(text, sizeof text, "%lu", (unsigned long)i);
        if (i % 7)
            dd_set_global_parent_context(i, i, i, i % 2, (int)(i % 1000), names, values, i % 4);
        else
            dd_clear_global_parent_context();
        memset(text, 'x', sizeof text);
    }
    return unused;
}

static void *adopting(void *unused)
{
    static Context one;
    while (!atomic_load(&done)) {
        check(ks_context(&one) == 0, ks_error());
        uint64_t i = one.trace_lo;
        char text[32];
        snprintf(text, sizeof text, "%lu", (unsigned long)i);
        bool whole = one.trace_hi == i && one.span == i && one.has_priority == i % 2 && one.many == i % 4 &&
                     one.priority == (i % 2 ? (int32_t)(i % 1000) : 0) && one.left_out == 0 && (i == 0 || i % 7);
        for (uint64_t tag = 0; tag < one.many && whole; tag++)
            whole = strcmp(one.tags[tag] + 64, text) == 0;
        check(whole, "half of a parent");
        atomic_fetch_add(&parents, i != 0);
    }
    return unused;
}

static void take(void)
{
    static char *rows, *names, *raws;
    static uint64_t totals[TOTALS];
    if (!rows) {
        rows = malloc((size_t)limits[ROWS] * limits[ROW_SIZE]);
        names = malloc(limits[NAME_BYTES]);
        raws = malloc((size_t)limits[RAWS_AT_MOST] * limits[RAW_SIZE]);
    }
    check(ks_take(rows, limits[ROWS], names, limits[NAME_BYTES], raws, limits[RAWS_AT_MOST], totals) == 0, ks_error());
    counted += totals[COUNTED];
    for (uint32_t i = 0; i < limits[REASONS]; i++)
        dropped += totals[DROPPED + i];
    late += totals[LATE_BYTES];
    atomic_fetch_add(&takes, 1);
    check(totals[STRAYS] == 0, "a stray buffer");
    check(totals[NAMES] <= 97, "one name twice");
    check(totals[RAWS] <= 1000 && totals[RAWS] + totals[LEFT_OUT] <= totals[COUNTED], "raw records");
    held = totals[HELD];
    atomic_fetch_add(&steps_taken, totals[STEPS]);
}

static void *taking(void *unused)
{
    while (!atomic_load(&done))
        take();
    return unused;
}

static void in_a_child(void)
{
    pid_t child = fork();
    if (child == 0) {
        Context none;
        char why[512];
        bool off = ks_on(0) == FORKED && ks_flush() == FORKED && ks_off() == FORKED && ks_keep(1) == FORKED &&
                   ks_arm(0) == FORKED && ks_context(&none) == FORKED && ks_step_error(why, sizeof why) == FORKED;
        dd_training_step_begin();
        dd_training_step_end();
        dd_set_global_parent_context(1, 2, 3, true, 4, NULL, NULL, 0);
        dd_clear_global_parent_context();
        _exit(off ? 0 : 1);
    }
    int status = -1;
    check(waitpid(child, &status, 0) == child && status == 0, "a forked child that isn't off");
}

int main(int many, char **arguments)
{
    check(many == 2, "which libcupti?");
    check(ks_open(arguments[1]) == 0, ks_error());
    check(ks_limits(limits, LIMITS) >= LIMITS && limits[TOTALS_SIZE] == TOTALS * sizeof(uint64_t) &&
              limits[CONTEXT_SIZE] == sizeof(Context) && limits[TAG_NAME] == 64,
          "another layout");
    void *mock = dlopen(arguments[1], RTLD_NOW);
    *(void **)&replay = dlsym(mock, "mock_replay");
    *(void **)&hold = dlsym(mock, "mock_hold");
    *(void **)&deliver = dlsym(mock, "mock_deliver");
    *(void **)&delivered = dlsym(mock, "mock_delivered");
    *(void **)&faults = dlsym(mock, "mock_faults");
    ks_keep(1000);
    ks_on(0);
    ks_off();
    static void *(*const others[])(void *) = {switching, taking, stepping, handing_over, adopting};
    enum { OTHERS = sizeof others / sizeof *others };
    pthread_t threads[REPLAYERS + OTHERS];
    for (uintptr_t i = 0; i < REPLAYERS; i++)
        pthread_create(&threads[i], NULL, replaying, (void *)i);
    for (int i = 0; i < OTHERS; i++)
        pthread_create(&threads[REPLAYERS + i], NULL, others[i], NULL);
    uint64_t began = now();
    while ((delivered() < ENOUGH * KERNEL || atomic_load(&takes) < 50 || atomic_load(&steps_taken) < 20) &&
           now() - began < 30000000000u)
        usleep(1000);
    for (int i = 0; i < 20; i++)
        in_a_child();
    atomic_store(&done, true);
    for (int i = 0; i < REPLAYERS + OTHERS; i++)
        pthread_join(threads[i], NULL);
    hold(false);
    check(ks_off() == 0, ks_error());
    deliver();
    take();
    check(held == 0, "buffers that never came back");
    check(faults() == 0, "a buffer that CUPTI still held");
    check(counted > ENOUGH / 2 && dropped > 0 && steps_taken >= 20 && atomic_load(&parents) > 0, "too little happened");
    check(steps_taken <= atomic_load(&armed), "more steps than were asked for");
    if ((counted + dropped) * KERNEL + late != delivered()) {
        fprintf(stderr, "%lu counted, %lu dropped, %lu bytes late, %lu delivered\n", (unsigned long)counted,
                (unsigned long)dropped, (unsigned long)late, (unsigned long)delivered());
        return 1;
    }
    printf("every byte is accounted for: %lu counted, %lu dropped, %lu bytes late, %lu times taken\n",
           (unsigned long)counted, (unsigned long)dropped, (unsigned long)late, atomic_load(&takes));
    return 0;
}

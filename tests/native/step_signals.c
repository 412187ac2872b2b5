/* Stands in for the two functions of Datadog's native tracer: writes a letter for each call to $STEP_SIGNALS. */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void note(const char *letter)
{
    const char *base = getenv("STEP_SIGNALS");
    char path[4096];
    if (base == NULL)
        return;
    snprintf(path, sizeof path, "%s.%d", base, (int)getpid());
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file >= 0) {
        if (write(file, letter, 1) != 1)
            abort();
        close(file);
    }
}

void dd_training_step_begin(void) { note("b"); }
void dd_training_step_end(void) { note("e"); }

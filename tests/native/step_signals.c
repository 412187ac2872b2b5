/* Stands in for the two functions of Datadog's native tracer: writes a letter for each call to $STEP_SIGNALS. */

#include "noting.h"

void dd_training_step_begin(void) { note("STEP_SIGNALS", "b"); }
void dd_training_step_end(void) { note("STEP_SIGNALS", "e"); }

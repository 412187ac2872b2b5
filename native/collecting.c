/* What Python's garbage collector takes of a step, for ddtrace_pytorch.training.collector.
 *
 * In C, because Python swallows whatever comes out of what it calls around a collection, and a signal that arrives
 * meanwhile is handled at the next instruction of Python's: in a callback that is written in Python, a Ctrl-C would be
 * lost. Here none is run.
 *
 * A change of what Python sees of this goes by another name, so that one that was built before is none.
 */

#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    PyObject *lifecycle;
    long long at_least, started, ns;
} Collections;

static PyObject *name_current, *name_progress, *name_step, *name_tags, *name_generation, *word;

static long long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (long long)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* The attribute, a new reference; takes that of `owner`, which may be NULL. */
static PyObject *of(PyObject *owner, PyObject *name)
{
    PyObject *found = owner ? PyObject_GetAttr(owner, name) : NULL;
    Py_XDECREF(owner);
    return found;
}

static void tell(Collections *self, long long took, PyObject *info)
{
    PyObject *generation = PyDict_Check(info) ? PyDict_GetItemWithError(info, name_generation) : NULL;
    if (took < self->at_least && !(generation && PyLong_Check(generation) && PyLong_AsLong(generation) == 2))
        return;
    PyObject *session = PyObject_GetAttr(self->lifecycle, name_current);
    if (session && session != Py_None) {
        self->ns += took;
        PyObject *tags = of(of(PyObject_GetAttr(self->lifecycle, name_progress), name_step), name_tags);
        if (tags && PyDict_Check(tags))
            PyDict_SetItem(tags, word, Py_None);
        Py_XDECREF(tags);
    }
    Py_XDECREF(session);
}

/* A member of gc.callbacks. Nothing is to come out of it, and there is nobody to tell. */
static PyObject *call(PyObject *object, PyObject *args, PyObject *names)
{
    Collections *self = (Collections *)object;
    PyObject *phase, *info;
    if (!PyArg_UnpackTuple(args, "collections", 2, 2, &phase, &info))
        return NULL;
    if (PyUnicode_Check(phase) && PyUnicode_CompareWithASCIIString(phase, "start") == 0) {
        self->started = now();
    } else if (self->started) {
        long long took = now() - self->started;
        self->started = 0;
        tell(self, took, info);
    }
    PyErr_Clear();
    Py_RETURN_NONE;
}

static int traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Collections *)self)->lifecycle);
    return 0;
}

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((Collections *)self)->lifecycle);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {{"ns", T_LONGLONG, offsetof(Collections, ns), READONLY, NULL}, {0}};
/* No tp_clear: the other ends of a circle can be cleared. */
static PyType_Slot slots[] = {
    {Py_tp_call, call}, {Py_tp_traverse, traverse}, {Py_tp_dealloc, dealloc}, {Py_tp_members, members}, {0, NULL}};
static PyType_Spec spec = {"ddtrace_pytorch.training._collecting.Collections", sizeof(Collections), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
static PyTypeObject *type;

/* See _collecting.pyi. */
static PyObject *collections(PyObject *module, PyObject *args)
{
    PyObject *lifecycle;
    long long at_least;
    if (!PyArg_ParseTuple(args, "OL:collections", &lifecycle, &at_least))
        return NULL;
    Collections *made = PyObject_GC_New(Collections, type);
    if (!made)
        return NULL;
    made->lifecycle = Py_NewRef(lifecycle);
    made->at_least = at_least;
    made->started = made->ns = 0;
    PyObject_GC_Track(made);
    return (PyObject *)made;
}

static PyMethodDef functions[] = {{"collections", collections, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_collecting", "Garbage collections, in C.", -1, functions};

PyMODINIT_FUNC PyInit__collecting(void)
{
    name_current = PyUnicode_InternFromString("current");
    name_progress = PyUnicode_InternFromString("progress");
    name_step = PyUnicode_InternFromString("step");
    name_tags = PyUnicode_InternFromString("tags");
    name_generation = PyUnicode_InternFromString("generation");
    word = PyUnicode_InternFromString("gc");
    type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (!name_current || !name_progress || !name_step || !name_tags || !name_generation || !word || !type)
        return NULL;
    return PyModule_Create(&definition);
}

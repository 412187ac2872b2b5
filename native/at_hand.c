/* The number in a tensor, for ddtrace_pytorch.records.scalars: what its carefully() does, for the ordinary tensor.
 *
 * A change of what Python sees of this goes by another name, so that one that was built before is none.
 */

#include <Python.h>

static PyObject *name_is_cpu;

/* `known`: what does it carefully; what takes the one element out of a tensor; and then what must give nothing true. */
static PyObject *at_hand(PyObject *known, PyObject *tensor)
{
    for (Py_ssize_t i = 2; i < PyTuple_GET_SIZE(known); i++) {
        PyObject *found = PyObject_CallNoArgs(PyTuple_GET_ITEM(known, i));
        if (!found)
            return NULL;
        int is = PyObject_IsTrue(found);
        Py_DECREF(found);
        if (is < 0)
            return NULL;
        if (is)
            return PyObject_CallOneArg(PyTuple_GET_ITEM(known, 0), tensor);
    }
    PyObject *here = PyObject_GetAttr(tensor, name_is_cpu);
    if (!here)
        return NULL;
    Py_DECREF(here);
    return PyObject_CallOneArg(PyTuple_GET_ITEM(known, here == Py_True ? 1 : 0), tensor);
}

static PyMethodDef at_hand_method = {"at_hand", at_hand, METH_O, NULL};

/* See _at_hand.pyi. */
static PyObject *reader(PyObject *module, PyObject *known)
{
    if (PyTuple_GET_SIZE(known) < 2) {
        PyErr_SetString(PyExc_TypeError, "reader() takes two functions or more");
        return NULL;
    }
    return PyCFunction_New(&at_hand_method, known);
}

static PyMethodDef functions[] = {{"reader", reader, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_at_hand", "Numbers in tensors, in C.", -1, functions};

PyMODINIT_FUNC PyInit__at_hand(void)
{
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    return name_is_cpu ? PyModule_Create(&definition) : NULL;
}

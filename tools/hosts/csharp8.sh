#!/bin/sh
# Write the sources of Microsoft.ML.OnnxRuntime 1.29 in DIR in C# 8, which .NET SDK 3.1 compiles.
# usage: csharp8.sh DIR
#
# Five lines are C# 9: three static lambdas, a `new` without its type, and an `is not`.
set -e
sed -i 's/Select(static ptr =>/Select(ptr =>/' "$1/InferenceSession.shared.cs"
sed -i 's/DisposableList<OrtValue> sequenceOrtValues = new(/var sequenceOrtValues = new DisposableList<OrtValue>(/
        s/if (node.Value is not TensorBase)/if (!(node.Value is TensorBase))/' \
    "$1/ManagedProjections.shared.cs"
